"""The commands that this package uses, and an access list that allows only these.

The file ``taskqueue.acl`` in the package's folder is the result of `access_list` for the default prefix, for the
setting ``aclfile`` in redis.conf. Login is impossible until ``#`` and the zeros, which are the SHA-256 of no password,
are replaced by ``>`` and a password, or by ``#`` and the SHA-256 of a password. The user ``default`` is off and cannot
log in, but has all rights, because Redis 7.0 to 8.4 loads its append-only file with the rights of this user. Sentinels
have separate access lists, and need at most ``+sentinel|master +client|setname``.
"""

from __future__ import annotations

NO_PASSWORD = "#" + "0" * 64

#: Commands that scripts execute, each with arguments that do no harm if KEY is an unused key that holds a string.
SCRIPT_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("DEL", "KEY"),
    ("EXISTS", "KEY"),
    ("GET", "KEY"),
    ("HDEL", "KEY", "a"),
    ("HGET", "KEY", "a"),
    ("HGETALL", "KEY"),
    ("HINCRBY", "KEY", "a", "1"),
    ("HKEYS", "KEY"),
    ("HMGET", "KEY", "a"),
    ("HRANDFIELD", "KEY", "1"),
    ("HSCAN", "KEY", "0"),
    ("HSET", "KEY", "a", "1"),
    ("HSETNX", "KEY", "a", "1"),
    ("LINDEX", "KEY", "0"),
    ("LRANGE", "KEY", "0", "0"),
    ("LTRIM", "KEY", "0", "0"),
    ("PUBLISH", "KEY", "a"),
    ("RPUSH", "KEY", "a"),
    ("SADD", "KEY", "a"),
    ("SET", "KEY", "a"),
    ("SINTER", "KEY", "KEY"),
    ("SMEMBERS", "KEY"),
    ("SRANDMEMBER", "KEY"),
    ("SREM", "KEY", "a"),
    ("XACK", "KEY", "a", "1-1"),
    ("XADD", "KEY", "*", "a", "1"),
    ("XCLAIM", "KEY", "a", "a", "0", "1-1"),
    ("XDEL", "KEY", "1-1"),
    ("XGROUP", "CREATE", "KEY", "a", "0"),
    ("XGROUP", "DELCONSUMER", "KEY", "a", "a"),
    ("XGROUP", "SETID", "KEY", "a", "0"),
    ("XINFO", "CONSUMERS", "KEY", "a"),
    ("XINFO", "GROUPS", "KEY"),
    ("XLEN", "KEY"),
    ("XPENDING", "KEY", "a"),
    ("XRANGE", "KEY", "-", "+", "COUNT", "1"),
    ("XREADGROUP", "GROUP", "a", "a", "COUNT", "1", "STREAMS", "KEY", ">"),
    ("ZADD", "KEY", "1", "a"),
    ("ZCARD", "KEY"),
    ("ZPOPMIN", "KEY"),
    ("ZRANGE", "KEY", "0", "0"),
    ("ZRANGEBYSCORE", "KEY", "0", "0"),
    ("ZRANK", "KEY", "a"),
    ("ZREM", "KEY", "a"),
    ("ZSCORE", "KEY", "a"),
    ("ZUNIONSTORE", "KEY", "1", "KEY"),
    ("TIME",),
)

#: Commands that clients send. ASKING and CLUSTER SLOTS are needed only for clusters.
CLIENT_COMMANDS = (
    "EVAL",
    "EVALSHA",
    "SCRIPT LOAD",
    "PING",
    "INFO",
    "ROLE",
    "WAIT",
    "SELECT",
    "SUBSCRIBE",
    "UNSUBSCRIBE",
    "CLIENT SETNAME",
    "CLUSTER SLOTS",
    "ASKING",
    "XREVRANGE",
    "BGREWRITEAOF",
    "ACL DRYRUN",
)


def access_list(prefix: str, user: str = "taskqueue", password: str = NO_PASSWORD) -> str:
    """Return the content of an ACL file for Redis 6.2 and later. ``password`` begins with ``>`` or ``#``."""
    scripts = {args[0] for args in SCRIPT_COMMANDS}
    commands = [name.replace(" ", "|") for name in (*CLIENT_COMMANDS, *scripts)]
    allowed = " ".join(f"+{name.lower()}" for name in sorted(commands))
    rules = f"resetkeys ~{{{prefix}:* resetchannels &{{{prefix}:* -@all -@dangerous {allowed}"
    return f"user default off ~* &* +@all\nuser {user} on {password} {rules}\n"
