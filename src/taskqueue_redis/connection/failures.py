"""Classification of errors: a table that says what to do about each error of Redis, and the failures that callers get.

::

    Failure
    ├── NotReached      the command was not executed
    ├── AnswerLost      the command may have been executed
    ├── Refused         the store refuses writes for now; the command was not executed
    ├── Misconfigured   an error in the configuration; the message says how to correct it
    ├── NoScript        the script is not loaded
    └── ScriptError     the script, or a command in it, failed

Messages contain no secrets, keys or payloads. Only a `ScriptError` contains text from the server.
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
    """The base class of failures. ``uncertain``: whether an attempt may have executed the command."""

    uncertain = False


class NotReached(Failure):
    """The command was not executed, for example because no server was available or the time limit had passed."""


class AnswerLost(Failure):
    """The command may have been executed, for example because the connection ended before the answer arrived."""

    uncertain = True


class Refused(Failure):
    """The store refuses writes for now, so the command was not executed. ``why``: OOM, MISCONF or NOREPLICAS."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


class Misconfigured(Failure):
    """Redis or this client is configured wrongly, and the command was not executed. The message says what to do."""

    started = False
    """whether the servers passed their checks before; if so, this failure counts as an outage"""


class NoScript(Failure):
    """The server does not know the script's hash, so the script was not executed."""


class ScriptError(Failure):
    """A script, or a command in it, failed.

    If the script returned ``redis.error_reply('TQ <code> <text>')``, these are ``code`` and ``text``. Otherwise
    ``code`` is the first word of the error, such as NOGROUP, BUSYGROUP or ERR, and ``text`` is the rest.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code} {text}".rstrip())
        self.code = code
        self.text = text


class ErrorReply(Exception):
    """An error reply of Redis. The parser returns it like any other reply, and does not raise it."""


class Lost(Exception):
    """A connection ended. ``reason`` is for logs; ``sent``: whether the command may have been sent before that."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.sent = sent


class Unreachable(Exception):
    """No connection to the server is possible; ``policy`` says what to do, ``failure`` what the caller gets."""

    def __init__(self, policy: Policy, failure: Failure) -> None:
        super().__init__(str(failure))
        self.policy = policy
        self.failure = failure


class Policy(Enum):
    """What the client does after an error."""

    WAIT = auto()
    """not executed: try again on the same server, after a pause"""
    SEEK = auto()
    """not executed: find the current master, then try again"""
    MOVED = auto()
    """not executed: the error names the slot's new node; use that node from now on"""
    ASK = auto()
    """not executed: the slot is moving; try the node that the error names, once"""
    REFUSE = auto()
    """not executed: the store accepts no writes; raise `Refused`"""
    LOAD = auto()
    """not executed: raise `NoScript`, so that the caller loads the script"""
    REPAIR = auto()
    """not executed: an operator must correct the configuration; raise `Misconfigured`"""
    RAISE = auto()
    """the script failed: raise `ScriptError`"""
    RESEND = auto()
    """possibly executed: find the current master, and send the command again if it is idempotent"""


class Rule(msgspec.Struct, frozen=True):
    """A row of the table, for errors whose code is ``code`` and whose text contains ``part``."""

    code: str
    policy: Policy
    cure: str
    """the problem, and what the operator can do about it"""
    part: str = ""


_RIGHTS = "compare its rights with the ACL file that ships with taskqueue_redis"
_COMMAND_MISSING = "this Redis lacks or forbids a command; use 6.2 or later"
_MASTER_UNKNOWN = "the Sentinels know no such master; correct the service in TASKQUEUE_REDIS_URL"
_LOGIN = "set TASKQUEUE_REDIS_USER and TASKQUEUE_REDIS_PASSWORD (or _PASSWORD_FILE)"

#: The first matching rule applies. Many errors share the code ERR; ``part`` distinguishes them by their text.
RULES = (
    Rule("LOADING", Policy.WAIT, "Redis is loading its data"),
    Rule("BUSY", Policy.WAIT, "Redis is busy with a script that does not end; kill that script"),
    Rule("TRYAGAIN", Policy.WAIT, "the slot's keys are moving between two nodes"),
    Rule("CLUSTERDOWN", Policy.SEEK, "the cluster does not serve all of its slots"),
    Rule("MASTERDOWN", Policy.SEEK, "this replica has lost its master"),
    Rule("READONLY", Policy.SEEK, "this server is a replica, not a master"),
    Rule("UNBLOCKED", Policy.SEEK, "the server changed its role, or the stream was deleted"),
    Rule("MOVED", Policy.MOVED, "the slot is on another node"),
    Rule("ASK", Policy.ASK, "the slot is moving to another node"),
    Rule("OOM", Policy.REFUSE, "Redis has reached maxmemory; drain queues, or raise maxmemory"),
    Rule("MISCONF", Policy.REFUSE, "Redis cannot write to its disk; free space, or repair it"),
    Rule("NOREPLICAS", Policy.REFUSE, "fewer replicas are connected than min-replicas-to-write"),
    Rule("NOSCRIPT", Policy.LOAD, "the script is not loaded"),
    Rule("NOAUTH", Policy.REPAIR, f"Redis asks for a password; {_LOGIN}"),
    Rule("WRONGPASS", Policy.REPAIR, f"Redis does not accept the user and password; {_LOGIN}"),
    Rule("NOPERM", Policy.REPAIR, f"the Redis user lacks a right; {_RIGHTS}"),
    Rule("DENIED", Policy.REPAIR, "Redis is in protected mode; give it a password"),
    Rule("CROSSSLOT", Policy.REPAIR, "the keys of a command are in several slots of the cluster"),
    Rule("NOPROTO", Policy.REPAIR, "this server does not support the Redis protocol"),
    Rule("ERR", Policy.WAIT, "Redis has reached maxclients; raise it", "max number of clients"),
    Rule("ERR", Policy.REPAIR, _COMMAND_MISSING, "unknown command"),
    Rule("ERR", Policy.REPAIR, _COMMAND_MISSING, "unknown subcommand"),
    Rule("ERR", Policy.REPAIR, _COMMAND_MISSING, "Unknown Redis command"),  # of a script
    Rule("ERR", Policy.REPAIR, f"this Redis has no password set; {_LOGIN}", "no password"),
    Rule("ERR", Policy.REPAIR, f"the password is wrong; {_LOGIN}", "invalid password"),
    Rule("ERR", Policy.REPAIR, f"the Redis user lacks a right; {_RIGHTS}", "The user executing"),
    Rule("ERR", Policy.REPAIR, f"the Redis user lacks a right; {_RIGHTS}", "ACL failure in script"),
    Rule("ERR", Policy.REPAIR, "this database does not exist", "DB index is out of range"),
    Rule("ERR", Policy.REPAIR, "a cluster has only database 0", "SELECT is not allowed"),
    Rule("ERR", Policy.REPAIR, "this Redis is no cluster; use a redis:// URL", "cluster support"),
    Rule("ERR", Policy.REPAIR, _MASTER_UNKNOWN, "No such master"),
)

_BY_CODE: dict[str, tuple[Rule, ...]] = {
    rule.code: tuple(other for other in RULES if other.code == rule.code) for rule in RULES
}

# Servers add the position in the script to the text of an error:
# Redis 7.0 appends it: "OOM … script: 50142d…, on @user_script:1."
# Valkey 9.1 appends it without the script's hash: "OOM … script: on @user_script:1."
# Redis 6.2 puts it first: "ERR Error running script (call to f_50142d…): @user_script:1: @user_script: 1: -OOM …",
# or "@user_script: 1: -OOM …" if the script returns the result of pcall().
_BEFORE = re.compile(
    r"ERR Error (?:running|compiling) script \((?:call to f_[0-9a-f]{40}|new function)\): "
)
_WHERE = re.compile(r"(?:@?user_script: ?[0-9]+: )+-?")
_AFTER = re.compile(r" script: (?:[0-9a-f]{40}, )?on @user_script:[0-9]+\.$")
_OWN = re.compile(r"TQ ([A-Za-z0-9_]+) ?")
_COMMAND = re.compile(r"run the '([a-z|]{1,30})' command")
_CODE = re.compile(r"[A-Z][A-Z0-9_]*(?= |$)")


def normalised(text: str) -> str:
    """Return the text of an error without the script position that Redis has added to it. Takes linear time."""
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
        rest = (word + rest)[where.end() :]  # the argument of Lua's error()
        return rest if _OWN.match(rest) else f"ERR {rest}"
    return text


def in_script(text: str) -> bool:
    """Return whether a command in a script failed, so that the commands before it were executed."""
    return "user_script:" in text


def classify(reply: ErrorReply) -> tuple[Policy, Failure]:
    """Return what the client does after an error reply, and the failure that it raises if no retry succeeds."""
    text = normalised(str(reply))
    if own := _OWN.match(text):
        if own[1] == "DENIED":
            return Policy.REPAIR, Misconfigured(f"the Redis user lacks a right; {_RIGHTS} (NOPERM)")
        return Policy.RAISE, ScriptError(own[1], text[own.end() :])
    match = _CODE.match(text)
    code = match[0] if match else "ERR"
    rest = text[len(code) :].strip() if match else text
    for rule in _BY_CODE.get(code, ()):
        if rule.part in text:
            return rule.policy, _failure(rule, rest)
    return Policy.RAISE, ScriptError(code, rest)


def says_denied(failure: Failure) -> bool:
    """Return whether the failure means that the ACL of the Redis user forbids the command."""
    return isinstance(failure, Misconfigured) and _RIGHTS in str(failure)


def says_login(failure: Failure) -> bool:
    """Return whether the failure means that Redis does not accept the login."""
    return isinstance(failure, Misconfigured) and _LOGIN in str(failure)


def classify_connecting(error: BaseException) -> tuple[Policy, Failure]:
    """Return what the client does after a failed attempt to connect, and the failure that it raises in the end."""
    known = (OSError, ErrorReply, ConfigurationError, Lost, Unreachable)
    # redis-py raises errors of its own instead of the cause, which says more.
    while not isinstance(error, known) and (cause := error.__cause__ or error.__context__):
        error = cause
    if isinstance(error, Unreachable):
        return error.policy, error.failure
    if isinstance(error, ssl.SSLCertVerificationError):
        why = getattr(error, "verify_message", "no reason given")
        return Policy.REPAIR, Misconfigured(
            f"the certificate of Redis is not trusted ({why}): set TASKQUEUE_REDIS_TLS_CA_FILE to the certificate of "
            "the CA that signed it, or give Redis a certificate that is valid for its host name"
        )
    if isinstance(error, ConfigurationError):
        return Policy.REPAIR, Misconfigured(str(error))
    if isinstance(error, ErrorReply):
        policy, failure = classify(error)
        if policy is Policy.RAISE:
            return Policy.REPAIR, Misconfigured(f"Redis refuses the login; {_LOGIN}")
        return policy, failure
    return Policy.SEEK, NotReached(_reason(error))


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no connection within TASKQUEUE_REDIS_CONNECT_TIMEOUT"
    if isinstance(error, Lost):
        return error.reason
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({getattr(error, 'reason', None) or 'no reason given'})"
    if isinstance(error, socket.gaierror):
        return "the host name of the server is unknown"
    number = getattr(error, "errno", None)
    if isinstance(number, int) and number > 0:
        return os.strerror(number)
    # The text of the error is not shown, because it may contain a secret.
    return f"connecting failed ({type(error).__name__})"


def _failure(rule: Rule, rest: str) -> Failure:
    message = f"{rule.cure} ({rule.code})"
    if rule.policy is Policy.REFUSE:
        return Refused(message, rule.code)
    if rule.policy is Policy.REPAIR:
        command = _COMMAND.search(rest)
        return Misconfigured(f"{command[1].upper()}: {message}" if command else message)
    if rule.policy is Policy.LOAD:
        return NoScript(message)
    return NotReached(message)
