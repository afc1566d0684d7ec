"""Basic authentication: a right password is verified once and then remembered, guessing is slow and costs little.

A bcrypt check takes 60 ms of a core and more, on purpose. So three bounds hold, and none of them reaches a client whose
password was verified before:

- of each address a few failures at once, then one each two seconds;
- of all addresses that never had a right password together, two checks a second;
- one check at a time, with one more that waits: the other threads of the server answer in the meantime.

Who is over a bound gets 429 without a check. The same wrong password again (a scraper with an old file) costs nothing.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeVar

from agent.clock import stopwatch
from exporters.web_config import CheckPassword

log = logging.getLogger("warpwatch.web")

T = TypeVar("T")

#: Addresses, and wrong passwords, that are remembered; the oldest is forgotten for one more.
_REMEMBERED: Final = 1024
#: A longer Authorization header is no password.
_HEADER_MAX: Final = 1024
#: An address whose guesses are refused is named in the log once in this time.
_LOG_PERIOD_S: Final = 60.0


class Verdict(Enum):
    """What is to be done with a request."""

    ALLOWED = "allowed"
    DENIED = "denied"
    LATER = "later"  # too many failures: not even looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthLimits:
    """How many passwords may be checked."""

    address_failures: int = 5  #: Wrong passwords of one address (IPv6: one /64) at once.
    address_interval_s: float = 2.0  #: One more after this time.
    unknown_checks: int = 8  #: Checks for all addresses at once that never had a right password.
    unknown_interval_s: float = 0.5  #: One more after this time.
    wait_s: float = 2.0  #: For the check before; a longer one is not waited for.


class TokenBucket:
    """Lets `burst` through at once, and one more each `interval_s`."""

    def __init__(self, burst: int, interval_s: float, now_s: float) -> None:
        """Start full."""
        self._burst = burst
        self._interval_s = interval_s
        self._tokens = float(burst)
        self._seen_s = now_s

    def take(self, now_s: float) -> bool:
        """Take one, where there is one."""
        self._tokens = min(self._burst, self._tokens + (now_s - self._seen_s) / self._interval_s)
        self._seen_s = now_s
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def give_back(self) -> None:
        """Return one that was taken for nothing."""
        self._tokens = min(self._burst, self._tokens + 1)


class BasicAuth:
    """Says who may come in. One object for the life of the server, so that a new file forgets no verified client."""

    def __init__(
        self, check: CheckPassword, limits: AuthLimits | None = None, seconds: Callable[[], float] = stopwatch
    ) -> None:
        """Verify by `check`, a bcrypt; `seconds` is a clock that nobody steps."""
        self._check_password = check
        self._limits = limits or AuthLimits()
        self._seconds = seconds
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()  # of all that follows; never held over a check
        self._verified: dict[str, bytes] = {}  # digest of the right password, by user
        self._wrong: OrderedDict[bytes, None] = OrderedDict()  # digests of wrong ones
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()  # of addresses that failed
        self._known: OrderedDict[str, None] = OrderedDict()  # addresses that had a right password
        self._unknown = TokenBucket(self._limits.unknown_checks, self._limits.unknown_interval_s, seconds())
        self._logged_s: OrderedDict[str, float] = OrderedDict()
        self._turn = threading.Lock()  # one check at a time
        self._places = threading.BoundedSemaphore(2)  # the one that is made, and one that waits

    def verdict(self, users: Mapping[str, bytes], header: str | None, address: str) -> Verdict:
        """Return whether the Authorization `header` of a client at `address` names one of `users`."""
        credentials = parse_basic(header)
        if credentials is None:
            return Verdict.DENIED
        user, password = credentials
        # Whether a user exists is not to be told from the time: somebody's hash is always checked.
        hashed = users.get(user, next(iter(users.values())))
        digest = self._digest(user, hashed, password)
        with self._lock:
            if user in users and hmac.compare_digest(self._verified.get(user, b""), digest):
                _remember(self._known, _network(address))
                return Verdict.ALLOWED
            if digest in self._wrong:
                self._wrong.move_to_end(digest)
                return Verdict.DENIED
        return self._verify(user if user in users else None, hashed, password, digest, address)

    def _verify(self, user: str | None, hashed: bytes, password: bytes, digest: bytes, address: str) -> Verdict:
        network = _network(address)
        bucket = self._take(network)
        if bucket is None:
            self._tell(network)
            return Verdict.LATER
        if not self._places.acquire(blocking=False):
            bucket.give_back()
            return Verdict.LATER
        try:
            if not self._turn.acquire(timeout=self._limits.wait_s):
                return Verdict.LATER
            try:
                is_right = self._check_password(password, hashed) and user is not None
            finally:
                self._turn.release()
        finally:
            self._places.release()
        with self._lock:
            if not is_right or user is None:
                _remember(self._wrong, digest)
                return Verdict.DENIED
            bucket.give_back()
            self._verified[user] = digest
            _remember(self._known, network)
            return Verdict.ALLOWED

    def _take(self, network: str) -> TokenBucket | None:
        """Return the bucket of an address with one taken from it, None where a bound holds."""
        now_s = self._seconds()
        with self._lock:
            bucket = self._buckets.pop(network, None) or TokenBucket(
                self._limits.address_failures, self._limits.address_interval_s, now_s
            )
            self._buckets[network] = bucket
            if len(self._buckets) > _REMEMBERED:
                self._buckets.popitem(last=False)
            if not bucket.take(now_s):
                return None
            return bucket if network in self._known or self._unknown.take(now_s) else None

    def _digest(self, user: str, hashed: bytes, password: bytes) -> bytes:
        digest = hashlib.blake2b(key=self._key, digest_size=32)
        for part in (user.encode("utf-8"), hashed, password):
            digest.update(len(part).to_bytes(4, "big") + part)
        return digest.digest()

    def _tell(self, network: str) -> None:
        now_s = self._seconds()
        with self._lock:
            if now_s - self._logged_s.get(network, -_LOG_PERIOD_S) < _LOG_PERIOD_S:
                return
            self._logged_s[network] = now_s
            if len(self._logged_s) > _REMEMBERED:
                self._logged_s.popitem(last=False)
        log.warning("too many wrong passwords from %s: its requests are refused for a while", network)


def _remember(kept: OrderedDict[T, None], item: T) -> None:
    kept[item] = None
    kept.move_to_end(item)
    if len(kept) > _REMEMBERED:
        kept.popitem(last=False)


def parse_basic(header: str | None) -> tuple[str, bytes] | None:
    """Return user and password of an Authorization header; None for any other scheme, and for what cannot be read."""
    scheme, _, encoded = (header or "").strip().partition(" ")
    if scheme.lower() != "basic" or len(encoded) > _HEADER_MAX:
        return None
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        name = user.decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return (name, password) if colon else None


def _network(address: str) -> str:
    """Return what counts as one client: an IPv4 address, or the /64 that an IPv6 host can choose addresses from."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    mapped = parsed.ipv4_mapped
    return str(mapped) if mapped is not None else str(ipaddress.IPv6Network((parsed, 64), strict=False))
