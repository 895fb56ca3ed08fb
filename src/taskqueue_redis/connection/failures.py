"""What each error of Redis, or of the way to it, means: one table, and the few errors that callers see.

::

    Failure
    ├── NotReached      nothing was executed
    ├── AnswerLost      it may have been executed
    ├── Refused         the store refuses writes for now; nothing was executed
    ├── Misconfigured   the installation is wrong; the message names the cure
    ├── NoScript        the script is not loaded
    └── ScriptError     the script, or a command in it, failed

Messages hold neither secrets nor keys nor payloads: of what a server said, only the code and what
this table knows.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
from enum import Enum, auto

import msgspec

from taskqueue_core.errors import ConfigurationError


class Failure(Exception):
    """The root. ``uncertain``: an earlier try of the same command may have been executed, its answer was lost."""

    uncertain = False


class NotReached(Failure):
    """Nothing was executed."""


class AnswerLost(Failure):
    """It may have been executed."""

    uncertain = True


class Refused(Failure):
    """The store refuses writes for now, and executed nothing. ``why`` is its code: OOM, MISCONF, NOREPLICAS."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


class Misconfigured(Failure):
    """The installation is wrong, and nothing was executed. The message names the cure."""


class NoScript(Failure):
    """The script is not loaded, and nothing was executed."""


class ScriptError(Failure):
    """The script, or a command in it, failed.

    After ``redis.error_reply('TQ <code> <text>')`` those two; else ``code`` is the error's first
    word (NOGROUP, BUSYGROUP, ERR) and ``text`` the rest of it.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code} {text}".rstrip())
        self.code = code
        self.text = text


class ErrorReply(Exception):
    """An error as Redis sent it: an answer, not something raised."""


class Lost(Exception):
    """A connection ended. ``reason`` says how, for logs; ``sent``: the command may have left before."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.sent = sent


class Unreachable(Exception):
    """No connection could be made; ``policy`` and ``failure`` are what the table says about the reason."""

    def __init__(self, policy: Policy, failure: Failure) -> None:
        super().__init__(str(failure))
        self.policy = policy
        self.failure = failure


class Policy(Enum):
    """What is done about an error."""

    WAIT = auto()
    """not executed: try again there, after a while"""
    SEEK = auto()
    """not executed: find out who is in charge, then try again"""
    MOVED = auto()
    """not executed: the slot's owner is named; ask that one from now on"""
    ASK = auto()
    """not executed: the slot is on its way; ask the named one this once"""
    REFUSE = auto()
    """not executed: the caller decides what to do with what cannot be stored"""
    LOAD = auto()
    """not executed: the caller sends the script itself"""
    REPAIR = auto()
    """not executed: somebody has to change the installation"""
    RAISE = auto()
    """the script's own business"""
    RESEND = auto()
    """nobody knows: find out who is in charge, and send it again if it is one that may be sent twice"""


class Rule(msgspec.Struct, frozen=True):
    """One line of the table: errors whose code is ``code`` and whose text has ``part`` in it."""

    code: str
    policy: Policy
    cure: str
    """what is the matter, and what helps"""
    part: str = ""


_RIGHTS = "compare its rights with the ACL file that ships with taskqueue_redis"
_LOGIN = "set TASKQUEUE_REDIS_USER and TASKQUEUE_REDIS_PASSWORD (or _PASSWORD_FILE)"

#: The first rule that fits counts. ERR is what Redis says when it has no better code, so those differ by their text.
RULES = (
    Rule("LOADING", Policy.WAIT, "Redis is loading its data"),
    Rule("BUSY", Policy.WAIT, "Redis is busy with somebody's endless script; end that one"),
    Rule("TRYAGAIN", Policy.WAIT, "the slot's keys are moving between two nodes"),
    Rule("CLUSTERDOWN", Policy.SEEK, "the cluster does not serve all of its slots"),
    Rule("MASTERDOWN", Policy.SEEK, "this replica has lost its master"),
    Rule("READONLY", Policy.SEEK, "this is a replica, no master (any more)"),
    Rule("UNBLOCKED", Policy.SEEK, "the server changed its role, or the stream was deleted"),
    Rule("MOVED", Policy.MOVED, "the slot lives on another node"),
    Rule("ASK", Policy.ASK, "the slot is moving to another node"),
    Rule("OOM", Policy.REFUSE, "Redis has reached its maxmemory; drain, or raise it"),
    Rule("MISCONF", Policy.REFUSE, "Redis cannot write to its disk; free space, or mend it"),
    Rule("NOREPLICAS", Policy.REFUSE, "fewer replicas are connected than min-replicas-to-write"),
    Rule("NOSCRIPT", Policy.LOAD, "the script is not loaded"),
    Rule("NOAUTH", Policy.REPAIR, f"Redis asks for a password; {_LOGIN}"),
    Rule("WRONGPASS", Policy.REPAIR, f"Redis does not accept user and password; {_LOGIN}"),
    Rule("NOPERM", Policy.REPAIR, f"the Redis user lacks a right; {_RIGHTS}"),
    Rule("DENIED", Policy.REPAIR, "Redis is in protected mode; give it a password"),
    Rule(
        "WRONGTYPE", Policy.REPAIR, "a key holds data of another program; use a prefix of your own"
    ),
    Rule("CROSSSLOT", Policy.REPAIR, "keys of one command lie in several slots of the cluster"),
    Rule("NOPROTO", Policy.REPAIR, "this is no Redis that speaks the common protocol"),
    Rule("NOGROUP", Policy.RAISE, "the consumer group is gone"),
    Rule("EXECABORT", Policy.RAISE, "the transaction was discarded"),
    Rule("ERR", Policy.WAIT, "Redis has no connection left (maxclients)", "max number of clients"),
    Rule("ERR", Policy.REPAIR, "this Redis lacks a command; use 6.2 or later", "unknown command"),
    Rule(
        "ERR", Policy.REPAIR, "this Redis lacks a command; use 6.2 or later", "unknown subcommand"
    ),
    Rule(
        "ERR",
        Policy.REPAIR,
        "this Redis lacks or forbids a command; use 6.2 or later",
        "Unknown Redis command",  # what a script is told
    ),
    Rule("ERR", Policy.REPAIR, f"this Redis has no password set; {_LOGIN}", "no password"),
    Rule("ERR", Policy.REPAIR, f"the password is wrong; {_LOGIN}", "invalid password"),
    Rule("ERR", Policy.REPAIR, f"the Redis user lacks a right; {_RIGHTS}", "The user executing"),
    Rule("ERR", Policy.REPAIR, f"the Redis user lacks a right; {_RIGHTS}", "ACL failure in script"),
    Rule("ERR", Policy.REPAIR, "this database does not exist", "DB index is out of range"),
    Rule("ERR", Policy.REPAIR, "a cluster has only database 0", "SELECT is not allowed"),
    Rule(
        "ERR",
        Policy.REPAIR,
        "this Redis is no cluster; use a redis:// URL",
        "cluster support disabled",
    ),
    Rule(
        "ERR",
        Policy.REPAIR,
        "the Sentinels know no master of this name; correct the service in TASKQUEUE_REDIS_URL",
        "No such master",
    ),
)

_BY_CODE: dict[str, tuple[Rule, ...]] = {
    rule.code: tuple(other for other in RULES if other.code == rule.code) for rule in RULES
}

# Redis 7.0 says after an error in a script where that was: "OOM … script: 50142d…, on @user_script:1.",
# Valkey 9.1 without the script's digest: "OOM … script: on @user_script:1.".
# Redis 6.2 says it before: "ERR Error running script (call to f_50142d…): @user_script:1: @user_script: 1: -OOM …",
# or "@user_script: 1: -OOM …" where the script returns what pcall() gave it.
_BEFORE = re.compile(
    r"ERR Error (?:running|compiling) script \((?:call to f_[0-9a-f]{40}|new function)\): "
)
_WHERE = re.compile(r"(?:@?user_script: ?[0-9]+: )+-?")
_AFTER = re.compile(r" script: (?:[0-9a-f]{40}, )?on @user_script:[0-9]+\.$")
_OWN = re.compile(r"TQ ([A-Za-z0-9_]+) ?")
_COMMAND = re.compile(r"run the '([a-z|]{1,30})' command")
_CODE = re.compile(r"[A-Z][A-Z0-9_]*(?= |$)")


def normalised(text: str) -> str:
    """Return an error as it would read outside of a script. Takes linear time."""
    text = text.rstrip("\r\n")
    before = _BEFORE.match(text)
    start = before.end() if before else 0
    where = _WHERE.match(text, start)
    if before or where:
        text = text[where.end() if where else start :]
        return text if _CODE.match(text) else f"ERR {text}"
    if (start := text.rfind(" script: ")) >= 0 and _AFTER.match(text, start):
        text = text[:start]
    head, word, rest = text.partition("user_script:")
    if head == "ERR " and (where := _WHERE.match(word + rest)):
        rest = (word + rest)[where.end() :]  # what error() was called with
        return rest if _OWN.match(rest) else f"ERR {rest}"
    return text


def judge(reply: ErrorReply) -> tuple[Policy, Failure]:
    """Return what is to be done about an error that Redis answered, and what to raise in the end."""
    text = normalised(str(reply))
    if own := _OWN.match(text):
        return Policy.RAISE, ScriptError(own[1], text[own.end() :])
    match = _CODE.match(text)
    code = match[0] if match else "ERR"
    rest = text[len(code) :].strip() if match else text
    for rule in _BY_CODE.get(code, ()):
        if rule.part in text:
            return rule.policy, _failure(rule, rest)
    return Policy.RAISE, ScriptError(code, rest)


def says_denied(failure: Failure) -> bool:
    """Whether it is the ACL that forbids the command."""
    return isinstance(failure, Misconfigured) and _RIGHTS in str(failure)


def judge_connecting(error: Exception) -> tuple[Policy, Failure]:
    """Return what is to be done about a connection that could not be made, and what to raise in the end."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = getattr(error, "verify_message", "no reason given")
        return Policy.REPAIR, Misconfigured(
            f"the certificate of Redis is not to be trusted ({why}): set TASKQUEUE_REDIS_TLS_CA_FILE "
            "to who signed it, or give Redis one that is valid for its name"
        )
    if isinstance(error, ConfigurationError):
        return Policy.REPAIR, Misconfigured(str(error))
    if isinstance(error, ErrorReply):
        policy, failure = judge(error)
        if policy is Policy.RAISE:
            return Policy.REPAIR, Misconfigured(f"Redis refuses the login; {_LOGIN}")
        return policy, failure
    return Policy.SEEK, NotReached(_reason(error))


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no connection within TASKQUEUE_REDIS_CONNECT_TIMEOUT"
    if isinstance(error, Lost):
        return error.reason
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({getattr(error, 'reason', None) or 'no reason given'})"
    if isinstance(error, socket.gaierror):
        return "the name of its host is not known"
    number = getattr(error, "errno", None)
    return os.strerror(number) if isinstance(number, int) and number > 0 else type(error).__name__


def _failure(rule: Rule, rest: str) -> Failure:
    message = f"{rule.cure} ({rule.code})"
    if rule.policy is Policy.REFUSE:
        return Refused(message, rule.code)
    if rule.policy is Policy.REPAIR:
        command = _COMMAND.search(rest)
        return Misconfigured(f"{command[1].upper()}: {message}" if command else message)
    if rule.policy is Policy.LOAD:
        return NoScript(message)
    if rule.policy is Policy.RAISE:
        return ScriptError(rule.code, rest)
    return NotReached(message)
