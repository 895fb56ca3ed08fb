"""The commands that this package uses, and an access list that allows only these.

The file ``taskqueue.acl`` in the package's folder contains the result of `access_list` for the default prefix. Use it
for the setting ``aclfile`` in redis.conf. Login is impossible until ``#`` and the zeros, which match no password, are
replaced by ``>`` and a password, or by ``#`` and the SHA-256 of a password. The user ``default`` is off and cannot
log in, but has all rights, because Redis 7.0 to 8.4 loads its append-only file with the rights of this user. Sentinels
have separate access lists, and need at most ``+sentinel|master +client|setname``.
"""

from __future__ import annotations

NO_PASSWORD = "#" + "0" * 64

#: Commands that scripts execute, grouped by arguments with which they do no harm. KEY: a spare key with a string.
_COMMANDS_BY_ARGUMENTS = {
    "KEY": "DEL EXISTS GET HGETALL PERSIST SMEMBERS SRANDMEMBER LLEN TYPE UNLINK XLEN ZCARD ZPOPMIN",
    "KEY a": "SET HDEL HGET HMGET PUBLISH RPUSH SADD SISMEMBER SREM XPENDING ZRANK ZREM ZSCORE",
    "KEY a 1": "HINCRBY HSET HSETNX",
    "KEY 0": "HSCAN LINDEX SSCAN ZSCAN",
    "KEY 0 0": "LRANGE LTRIM ZCOUNT ZRANGE ZRANGEBYSCORE",
    "KEY 1": "HRANDFIELD PEXPIRE ZRANDMEMBER",
    "KEY 0 a": "LSET",
    "KEY KEY": "RENAME SINTER",
    "KEY a 1-1": "XACK",
    "KEY * a 1": "XADD",
    "KEY a a 0 1-1": "XCLAIM",
    "KEY 1-1": "XDEL",
    "CREATE KEY a 0": "XGROUP",
    "DELCONSUMER KEY a a": "XGROUP",
    "SETID KEY a 0": "XGROUP",
    "CONSUMERS KEY a": "XINFO",
    "GROUPS KEY": "XINFO",
    "KEY - + COUNT 1": "XRANGE",
    "KEY + - COUNT 1": "XREVRANGE",
    "GROUP a a COUNT 1 STREAMS KEY >": "XREADGROUP",
    "KEY 1 a": "ZADD",
    "KEY 1 KEY": "ZUNIONSTORE",
    "": "TIME",
}
SCRIPT_COMMANDS: tuple[tuple[str, ...], ...] = tuple(
    (name, *arguments.split())
    for arguments, names in _COMMANDS_BY_ARGUMENTS.items()
    for name in names.split()
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
    "BGREWRITEAOF",
    "ACL DRYRUN",
)


def rights_in_lua(key: str) -> str:
    """Return a Lua expression that is true if the user may execute all commands of scripts.

    ``key``: Lua expression for a key. PUBLISH is left out, because scripts work without notifications.
    """
    calls = [
        ", ".join(key if word == "KEY" else f"'{word}'" for word in words)
        for words in SCRIPT_COMMANDS
        if words[0] != "PUBLISH"
    ]
    return " and ".join(f"redis.acl_check_cmd({words})" for words in calls)


def access_list(prefix: str, user: str = "taskqueue", password: str = NO_PASSWORD) -> str:
    """Return the content of an ACL file for Redis 6.2 and later. ``password`` begins with ``>`` or ``#``."""
    scripts = {args[0] for args in SCRIPT_COMMANDS}
    commands = [name.replace(" ", "|") for name in (*CLIENT_COMMANDS, *scripts)]
    allowed = " ".join(f"+{name.lower()}" for name in sorted(commands))
    rules = f"resetkeys ~{{{prefix}:* resetchannels &{{{prefix}:* -@all -@dangerous {allowed}"
    return f"user default off ~* &* +@all\nuser {user} on {password} {rules}\n"
