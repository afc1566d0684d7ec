"""Builds OpenSSL's context from the web configuration, whose names for versions, suites and curves are those of Go."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from agent.errors import UsageError
from exporters.web_config import TlsConfig

_VERSIONS: Final = {
    "TLS10": ssl.TLSVersion.TLSv1,
    "TLS11": ssl.TLSVersion.TLSv1_1,
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}
_CLIENT_AUTH: Final = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
#: The suites that Go's crypto/tls offers up to TLS 1.2, by its names; those of TLS 1.3 cannot be chosen there either.
CIPHER_SUITES: Final[Mapping[str, str]] = {
    "TLS_RSA_WITH_AES_128_CBC_SHA": "AES128-SHA",
    "TLS_RSA_WITH_AES_256_CBC_SHA": "AES256-SHA",
    "TLS_RSA_WITH_AES_128_GCM_SHA256": "AES128-GCM-SHA256",
    "TLS_RSA_WITH_AES_256_GCM_SHA384": "AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
}
_TLS13_SUITES: Final = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")


def build_context(config: TlsConfig, source: Path) -> ssl.SSLContext:
    """Return a server's context; raises UsageError that names the file, of those in `source`, and what is wrong."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[config.min_version]
    context.maximum_version = _VERSIONS[config.max_version]
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    if config.prefer_server_cipher_suites:
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    else:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(["http/1.1"])
    _set_ciphers(context, config, source)
    if config.curve is not None:
        context.set_ecdh_curve(config.curve)
    _load_certificate(context, config)
    if config.client_ca_file is not None:
        _load_client_authority(context, config.client_ca_file)
    context.verify_mode = _CLIENT_AUTH[config.client_auth]
    return context


def _set_ciphers(context: ssl.SSLContext, config: TlsConfig, source: Path) -> None:
    chosen = [name for name in config.cipher_suites if name not in _TLS13_SUITES]
    unknown = [name for name in chosen if name not in CIPHER_SUITES]
    if unknown:
        raise UsageError(f"{source}: tls_server_config.cipher_suites: unknown or unsafe suite {unknown[0]!r}")
    if not chosen:
        return
    try:
        context.set_ciphers(":".join(CIPHER_SUITES[name] for name in chosen))
    except ssl.SSLError as error:
        raise UsageError(f"{source}: tls_server_config.cipher_suites: OpenSSL here has none of them") from error


def _load_certificate(context: ssl.SSLContext, config: TlsConfig) -> None:
    for path, what in ((config.cert_file, "certificate"), (config.key_file, "key")):
        _check_readable(path, what)
    try:
        # A key behind a pass phrase must not stop a service at a prompt.
        context.load_cert_chain(config.cert_file, config.key_file, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UsageError(
                f"the key {config.key_file} is not the one of the certificate {config.cert_file}"
            ) from error
        raise UsageError(
            f"cannot use the certificate {config.cert_file} with the key {config.key_file}: {_reason(error)}; "
            "both must be PEM, and the key without a pass phrase"
        ) from error


def _load_client_authority(context: ssl.SSLContext, path: Path) -> None:
    _check_readable(path, "client CA")
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise UsageError(f"cannot use the client CA {path}: {_reason(error)}; it must hold PEM certificates") from error


def _check_readable(path: Path, what: str) -> None:
    try:
        with path.open("rb") as stream:
            stream.read(1)
    except OSError as error:
        raise UsageError(f"cannot read the {what} {path}: {error.strerror}") from error


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or error.strerror or "not understood").replace("_", " ").lower()


def subject_alternative_names(certificate: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the names of a client's certificate, as ssl.SSLSocket.getpeercert gives it: DNS, IP, e-mail, URI."""
    for kind, name in (certificate or {}).get("subjectAltName", ()):
        if kind in {"DNS", "IP Address", "email", "URI"}:
            yield name
