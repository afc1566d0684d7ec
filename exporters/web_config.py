"""Reads a web configuration file as Prometheus and its exporters have it: TLS, basic authentication, headers.

The format is the one of the Prometheus exporter toolkit, so that one file serves node_exporter and this agent. What it
knows and cannot be done here is refused with a reason, never skipped: a file that asks for more safety than it gets
would be worse than none. Needs PyYAML (and bcrypt where there are users): warpwatch[web].
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

from agent.admin_file import read_admin_file
from agent.errors import UsageError

if TYPE_CHECKING:
    import yaml

ClientAuth = Literal["none", "optional", "required"]

#: A password takes 60 ms at cost 10 and twice that for each step more: 4 s at 16, the most that makes sense.
_COST_MAX: Final = 16
_BCRYPT: Final = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{53}")
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

_TABLES: Final = ("tls_server_config", "http_server_config", "basic_auth_users", "rate_limit")
_TLS_KEYS: Final = (
    "cert_file",
    "key_file",
    "client_auth_type",
    "client_ca_file",
    "client_allowed_sans",
    "min_version",
    "max_version",
    "cipher_suites",
    "prefer_server_cipher_suites",
    "curve_preferences",
)
_INLINE: Final = "is not read here: write it to a file and name that as {}_file"
_REFUSED: Final = {name: _INLINE.format(name) for name in ("cert", "key", "client_ca")}
_CLIENT_AUTH: Final[Mapping[str, ClientAuth]] = {
    "NoClientCert": "none",
    # Asked for and not looked at: whoever comes without one is let in as well.
    "RequestClientCert": "none",
    "VerifyClientCertIfGiven": "optional",
    "RequireAndVerifyClientCert": "required",
}
VERSIONS: Final = ("TLS10", "TLS11", "TLS12", "TLS13")
#: Names of Go for elliptic curves, and those of OpenSSL.
CURVES: Final = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1", "X25519": "X25519"}
#: Headers that may be set, with the values that are allowed where not all are.
_HEADERS: Final[Mapping[str, tuple[str, ...]]] = {
    "Content-Security-Policy": (),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-Content-Type-Options": ("nosniff",),
    "X-XSS-Protection": (),
    "Strict-Transport-Security": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Table `tls_server_config`."""

    cert_file: Path
    key_file: Path
    client_auth: ClientAuth = "none"
    client_ca_file: Path | None = None
    client_allowed_sans: tuple[str, ...] = ()  # one of the names of the client's certificate has to be among them
    min_version: str = "TLS12"
    max_version: str = "TLS13"
    cipher_suites: tuple[str, ...] = ()  # Go's names, for TLS 1.2 and older; empty for the defaults
    prefer_server_cipher_suites: bool = True
    curve: str | None = None  # OpenSSL's name


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """Table `rate_limit`: a token bucket over all requests."""

    interval_s: float = 0.0  # of one request; 0 for no limit
    burst: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WebConfig:
    """The whole file."""

    tls: TlsConfig | None = None
    users: Mapping[str, bytes] = field(default_factory=dict)  # bcrypt hashes by user; empty where nobody is asked
    headers: Mapping[str, str] = field(default_factory=dict)
    rate_limit: RateLimit = field(default_factory=RateLimit)
    is_blank: bool = field(default=False, compare=False)  # the file has nothing in it, not even `{}`

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that the configuration names."""
        tls = self.tls
        named = () if tls is None else (tls.cert_file, tls.key_file, tls.client_ca_file)
        return tuple(path for path in named if path is not None)


def load_web_config(path: Path) -> WebConfig:
    """Return what `path` asks for; raises UsageError with the line for what is wrong with it.

    Paths in the file are meant from its folder. The files they name are not opened here.
    """
    try:
        import yaml
    except ImportError as error:
        raise UsageError(f"[export] web_config = {str(path)!r} needs PyYAML: pip install 'warpwatch[web]'") from error
    text = read_admin_file(path, "web configuration")
    try:
        # Nodes, not objects: they know their lines, and nothing in the file is ever made into more than text.
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}, line {mark.line + 1}" if mark is not None else str(path)
        raise UsageError(f"{place}: not valid YAML: {error.problem or error.context}") from error
    except RecursionError as error:
        raise UsageError(f"web configuration {path} is nested too deeply") from error
    except yaml.YAMLError as error:
        raise UsageError(f"web configuration {path} is not valid YAML: {' '.join(str(error).split())}") from error
    return _Reader(path).read(root)


class _Reader:
    """Turns YAML nodes into the configuration; every error names the line and the key in full."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, root: yaml.Node | None) -> WebConfig:
        if root is None:
            return WebConfig(is_blank=True)
        tables = self._table(root, "", _TABLES)
        tls = self._tls(tables["tls_server_config"]) if "tls_server_config" in tables else None
        http = tables.get("http_server_config")
        return WebConfig(
            tls=tls,
            users=self._users(tables["basic_auth_users"]) if "basic_auth_users" in tables else {},
            headers={} if http is None else self._headers(http),
            rate_limit=self._rate_limit(tables["rate_limit"]) if "rate_limit" in tables else RateLimit(),
        )

    def _tls(self, node: yaml.Node) -> TlsConfig:
        prefix = "tls_server_config."
        values = self._table(node, prefix, _TLS_KEYS, _REFUSED)
        for name in ("cert_file", "key_file"):
            if name not in values:
                self._fail(node, f"{prefix}{name} is missing: TLS needs a certificate and its key")
        texts = {
            name: self._text(value, prefix + name)
            for name, value in values.items()
            if name in {"cert_file", "key_file", "client_ca_file", "client_auth_type", "min_version", "max_version"}
        }
        lists = {
            name: self._list(values[name], prefix + name) if name in values else ()
            for name in ("client_allowed_sans", "cipher_suites", "curve_preferences")
        }
        auth = self._client_auth(values.get("client_auth_type"), texts.get("client_auth_type", "NoClientCert"))
        if auth != "none" and "client_ca_file" not in texts:
            self._fail(node, f"{prefix}client_ca_file is missing: nothing says which client certificates are right")
        if auth == "none" and "client_ca_file" in texts:
            self._fail(
                values["client_ca_file"],
                f"{prefix}client_ca_file is set and no client is asked for a certificate; "
                "set client_auth_type: RequireAndVerifyClientCert",
            )
        if auth != "required" and lists["client_allowed_sans"]:
            self._fail(
                values["client_allowed_sans"],
                f"{prefix}client_allowed_sans needs client_auth_type: RequireAndVerifyClientCert",
            )
        low, high = texts.get("min_version", "TLS12"), texts.get("max_version", "TLS13")
        for name, version in (("min_version", low), ("max_version", high)):
            if version not in VERSIONS:
                self._fail(values[name], f"{prefix}{name} is {version!r}; it must be one of {', '.join(VERSIONS)}")
        if VERSIONS.index(low) > VERSIONS.index(high):
            self._fail(node, f"{prefix}min_version {low} is above max_version {high}")
        prefer = values.get("prefer_server_cipher_suites")
        return TlsConfig(
            cert_file=self._file(texts["cert_file"]),
            key_file=self._file(texts["key_file"]),
            client_auth=auth,
            client_ca_file=self._file(texts["client_ca_file"]) if "client_ca_file" in texts else None,
            client_allowed_sans=lists["client_allowed_sans"],
            min_version=low,
            max_version=high,
            cipher_suites=lists["cipher_suites"],
            prefer_server_cipher_suites=prefer is None or self._flag(prefer, prefix + "prefer_server_cipher_suites"),
            curve=self._curve(values.get("curve_preferences"), lists["curve_preferences"]),
        )

    def _client_auth(self, node: yaml.Node | None, name: str) -> ClientAuth:
        if name == "RequireAnyClientCert":
            why = "takes any certificate, also a forged one, and is not offered; set RequireAndVerifyClientCert"
            self._fail(node, f"tls_server_config.client_auth_type {name} {why}")
        if name not in _CLIENT_AUTH:
            allowed = ", ".join(_CLIENT_AUTH)
            self._fail(node, f"tls_server_config.client_auth_type is {name!r}; it must be one of {allowed}")
        return _CLIENT_AUTH[name]

    def _curve(self, node: yaml.Node | None, names: tuple[str, ...]) -> str | None:
        unknown = [name for name in names if name not in CURVES]
        if unknown:
            self._fail(node, f"tls_server_config.curve_preferences: unknown curve {unknown[0]!r}; {', '.join(CURVES)}")
        if len(names) > 1:
            self._fail(node, "tls_server_config.curve_preferences: Python's TLS takes one curve; name one or none")
        return CURVES[names[0]] if names else None

    def _headers(self, node: yaml.Node) -> dict[str, str]:
        values = self._table(node, "http_server_config.", ("http2", "headers"))
        if "http2" in values:
            # Whether HTTP/2 is allowed: every client of it speaks HTTP/1.1 too, which is what there is here.
            self._flag(values["http2"], "http_server_config.http2")
        if "headers" not in values:
            return {}
        headers: dict[str, str] = {}
        for name, value in self._table(values["headers"], "http_server_config.headers.", tuple(_HEADERS)).items():
            text = self._text(value, f"http_server_config.headers.{name}")
            if _HEADERS[name] and text not in _HEADERS[name]:
                allowed = " or ".join(_HEADERS[name])
                self._fail(value, f"http_server_config.headers.{name} is {text!r}; it must be {allowed}")
            if not text.isascii() or not text.isprintable():
                self._fail(value, f"http_server_config.headers.{name} may hold printable ASCII only")
            headers[name] = text
        return headers

    def _users(self, node: yaml.Node) -> dict[str, bytes]:
        users: dict[str, bytes] = {}
        for name, value in self._table(node, "basic_auth_users.", None).items():
            found = _BCRYPT.fullmatch(self._text(value, f"basic_auth_users.{name}"))
            if ":" in name:
                self._fail(value, f"basic_auth_users.{name}: no browser or scraper can send a user name with a colon")
            if found is None:
                # The value is a secret, or worse, a password that was meant to be hashed: never shown.
                self._fail(
                    value, f"basic_auth_users.{name} is no bcrypt hash; htpasswd -nBC 10 '' | tr -d ':\\n' makes one"
                )
            if not 4 <= int(found[1]) <= _COST_MAX:
                self._fail(value, f"basic_auth_users.{name} has cost {int(found[1])}; it must be from 4 to {_COST_MAX}")
            users[name] = found[0].encode("ascii")
        return users

    def _rate_limit(self, node: yaml.Node) -> RateLimit:
        values = self._table(node, "rate_limit.", ("interval", "burst"))
        interval_s, burst = 0.0, 0
        if "interval" in values:
            text = self._text(values["interval"], "rate_limit.interval")
            parts = _DURATION.findall(text)
            if text != "0" and (not parts or "".join(map("".join, parts)) != text):
                self._fail(values["interval"], f"rate_limit.interval is {text!r}; write a duration such as 1s or 500ms")
            interval_s = sum(float(number) * _SECONDS[unit] for number, unit in parts)
        if "burst" in values:
            text = self._text(values["burst"], "rate_limit.burst")
            if not text.isascii() or not text.isdigit():
                self._fail(values["burst"], f"rate_limit.burst is {text!r}; it must be a whole number")
            burst = int(text)
        if interval_s and not burst:
            self._fail(node, "rate_limit.burst is missing: without it no request would be answered")
        return RateLimit(interval_s=interval_s, burst=burst)

    def _table(
        self, node: yaml.Node, prefix: str, allowed: tuple[str, ...] | None, refused: Mapping[str, str] | None = None
    ) -> dict[str, yaml.Node]:
        """Return the values of a mapping by key; any key where `allowed` is None."""
        import yaml

        if _is_null(node):
            return {}
        if not isinstance(node, yaml.MappingNode):
            self._fail(node, f"{prefix.rstrip('.') or 'the file'} must be a table of keys and values")
        values: dict[str, yaml.Node] = {}
        for key_node, value in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else ""
            if refused and key in refused:
                self._fail(key_node, f"{prefix}{key} {refused[key]}")
            if not key or (allowed is not None and key not in allowed):
                near = difflib.get_close_matches(key, allowed or (), n=1)
                hint = f"did you mean {prefix + near[0]!r}?" if near else f"allowed here: {', '.join(allowed or ())}"
                self._fail(key_node, f"unknown key {prefix + key!r}; {hint}")
            if key in values:
                self._fail(key_node, f"{prefix}{key} stands here twice")
            values[key] = value
        return values

    def _text(self, node: yaml.Node, key: str) -> str:
        import yaml

        if not isinstance(node, yaml.ScalarNode) or not node.value or _is_null(node):
            self._fail(node, f"{key} must be a text that is not empty")
        text: str = node.value
        return text

    def _list(self, node: yaml.Node, key: str) -> tuple[str, ...]:
        import yaml

        if _is_null(node):
            return ()
        if not isinstance(node, yaml.SequenceNode):
            self._fail(node, f"{key} must be a list")
        return tuple(self._text(item, key) for item in node.value)

    def _flag(self, node: yaml.Node, key: str) -> bool:
        text = self._text(node, key).lower()
        if text not in {"true", "false"}:
            self._fail(node, f"{key} is {text!r}; it must be true or false")
        return text == "true"

    def _file(self, name: str) -> Path:
        return self._path.parent / name

    def _fail(self, node: Any, message: str) -> NoReturn:  # noqa: ANN401 - a node of any kind, or none
        place = f"{self._path}, line {node.start_mark.line + 1}" if node is not None else str(self._path)
        raise UsageError(f"{place}: {message}")


def _is_null(node: yaml.Node) -> bool:
    return node.tag == "tag:yaml.org,2002:null"


#: Verifies a password against a bcrypt hash.
CheckPassword = Callable[[bytes, bytes], bool]


def password_checker(path: Path) -> CheckPassword:
    """Return bcrypt's check; raises UsageError where it is not installed."""
    try:
        import bcrypt
    except ImportError as error:
        raise UsageError(f"basic_auth_users in {path} needs bcrypt: pip install 'warpwatch[web]'") from error

    def check(password: bytes, hashed: bytes) -> bool:
        # What follows 72 bytes is no part of the hash, by its definition; a NUL cannot be.
        return b"\0" not in password and bool(bcrypt.checkpw(password[:72], hashed))

    return check
