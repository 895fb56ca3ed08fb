"""Copy the newest run in Prefect's database with its state. Arguments: the URL of the database, and a number."""

import asyncio
import sys

import asyncpg  # type: ignore[import-not-found]  # of Prefect

STATEMENTS = (
    "CREATE TEMP TABLE one AS SELECT * FROM task_run ORDER BY created DESC LIMIT 1",
    "CREATE TEMP TABLE copy AS SELECT one.* FROM one, generate_series(1, {count})",
    "UPDATE copy SET id = gen_random_uuid(), state_id = gen_random_uuid(), dynamic_key = gen_random_uuid()",
    "CREATE TEMP TABLE old AS SELECT s.* FROM task_run_state s, one WHERE s.id = one.state_id",
    "CREATE TEMP TABLE state AS SELECT old.*, copy.id AS run, copy.state_id AS own FROM copy, old",
    "UPDATE state SET id = own, task_run_id = run",
    "ALTER TABLE state DROP COLUMN own, DROP COLUMN run",
    "SET session_replication_role = replica",  # a run and its state refer to each other
    "INSERT INTO task_run SELECT * FROM copy",
    "INSERT INTO task_run_state SELECT * FROM state",
    "ANALYZE task_run",
)


async def main(url: str, count: int) -> None:
    """Run the statements."""
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    try:
        async with connection.transaction():
            for statement in STATEMENTS:
                await connection.execute(statement.format(count=count))
    finally:
        await connection.close()
    sys.stdout.write("null")


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
