"""The web configuration file: what it may say, and the one sentence for what it may not."""

from __future__ import annotations

import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from agent.errors import UsageError
from exporters.web_access import check_web_config
from exporters.web_config import RateLimit, TlsConfig, WebConfig, load_web_config
from exporters.web_tls import CIPHER_SUITES
from tests.exporters.certificates import Authority

HASH = "$2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG"
TLS = "tls_server_config:\n  cert_file: server.crt\n  key_file: /keys/server.key\n"


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "web.yml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_a_whole_file(written):
    path = written(f"""
tls_server_config:
  cert_file: server.crt
  key_file: /keys/server.key
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: ca/clients.pem
  client_allowed_sans: [prometheus.example.org, spiffe://cluster/prometheus]
  min_version: TLS13
  max_version: TLS13
  cipher_suites:
    - TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384
  prefer_server_cipher_suites: false
  curve_preferences: [X25519]
http_server_config:
  http2: true
  headers:
    Strict-Transport-Security: max-age=31536000
    X-Frame-Options: deny
basic_auth_users:
  prometheus: {HASH}
rate_limit:
  interval: 1m0.5s
  burst: 20
""")
    assert load_web_config(path) == WebConfig(
        tls=TlsConfig(
            cert_file=path.parent / "server.crt",
            key_file=Path("/keys/server.key"),
            client_auth="required",
            client_ca_file=path.parent / "ca" / "clients.pem",
            client_allowed_sans=("prometheus.example.org", "spiffe://cluster/prometheus"),
            min_version="TLS13",
            cipher_suites=("TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",),
            prefer_server_cipher_suites=False,
            curve="X25519",
        ),
        users={"prometheus": HASH.encode()},
        headers={"Strict-Transport-Security": "max-age=31536000", "X-Frame-Options": "deny"},
        rate_limit=RateLimit(interval_s=60.5, burst=20),
    )


@pytest.mark.parametrize("text", ["", "# nothing\n", "basic_auth_users:\n", "http_server_config:\n  headers:\n"])
def test_an_empty_file_asks_for_nothing(written, text):
    assert load_web_config(written(text)) == WebConfig()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: [\n", "line 2: not valid YAML: "),
        ("a: b\n\tc: d\n", "line 2: not valid YAML: "),
        ("- a\n", "line 1: the file must be a table of keys and values"),
        ("\ntls_config:\n  a: b\n", "line 2: unknown key 'tls_config'; did you mean 'tls_server_config'?"),
        (TLS + "  cert_fil: x\n", "line 4: unknown key 'tls_server_config.cert_fil'; did you mean"),
        (TLS + "  cert: x\n", "line 4: tls_server_config.cert is not read here: write it to a file and name that as"),
        (TLS + "  key_file: x\n", "line 4: tls_server_config.key_file stands here twice"),
        ("tls_server_config:\n  cert_file: x\n", "line 2: tls_server_config.key_file is missing"),
        (TLS + "  key_file:\n", "stands here twice"),
        ("tls_server_config:\n  cert_file: [x]\n  key_file: y\n", "line 2: tls_server_config.cert_file must be a text"),
        (TLS + "  min_version: SSL30\n", "line 4: tls_server_config.min_version is 'SSL30'; it must be one of TLS10"),
        (TLS + "  min_version: TLS13\n  max_version: TLS12\n", "min_version TLS13 is above max_version TLS12"),
        (TLS + "  client_auth_type: Yes\n", "line 4: tls_server_config.client_auth_type is 'Yes'; it must be one of"),
        (TLS + "  client_auth_type: RequireAnyClientCert\n", "takes any certificate, also a forged one"),
        (TLS + "  client_auth_type: RequireAndVerifyClientCert\n", "client_ca_file is missing: nothing says which"),
        (TLS + "  client_ca_file: x\n", "line 4: tls_server_config.client_ca_file is set and no client is asked"),
        (TLS + "  client_allowed_sans: [a]\n", "line 4: tls_server_config.client_allowed_sans needs client_auth_type"),
        (TLS + "  curve_preferences: [P1]\n", "line 4: tls_server_config.curve_preferences: unknown curve 'P1'"),
        (TLS + "  curve_preferences: [X25519, CurveP256]\n", "takes one curve; name one or none"),
        (TLS + "  cipher_suites: TLS_A\n", "line 4: tls_server_config.cipher_suites must be a list"),
        ("http_server_config:\n  http2: 2\n", "line 2: http_server_config.http2 is '2'; it must be true or false"),
        ("http_server_config:\n  headers:\n    Server: x\n", "line 3: unknown key 'http_server_config.headers.Server'"),
        ("http_server_config:\n  headers:\n    X-Frame-Options: no\n", "is 'no'; it must be deny or sameorigin"),
        ("basic_auth_users:\n  eve: hunter2\n", "line 2: basic_auth_users.eve is no bcrypt hash; htpasswd -nBC 10"),
        (f"basic_auth_users:\n  eve: {HASH.replace('$10$', '$31$')}\n", "eve has cost 31; it must be from 4 to 16"),
        (f"basic_auth_users:\n  'a:b': {HASH}\n", "can send a user name with a colon"),
        ("rate_limit:\n  interval: 1 s\n", "line 2: rate_limit.interval is '1 s'; write a duration such as 1s"),
        ("rate_limit:\n  interval: 1s\n", "rate_limit.burst is missing"),
        ("rate_limit:\n  burst: -1\n", "line 2: rate_limit.burst is '-1'; it must be a whole number"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(written, text, complaint):
    path = written(text)
    with pytest.raises(UsageError) as raised:
        load_web_config(path)
    assert str(raised.value).startswith(str(path))
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_password_that_was_not_hashed_is_not_shown(written):
    with pytest.raises(UsageError) as raised:
        load_web_config(written("basic_auth_users:\n  eve: hunter2\n"))
    assert "hunter2" not in str(raised.value)


def test_a_file_that_is_not_there_or_no_text(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read web configuration .*web\.yml: No such file or directory"):
        load_web_config(tmp_path / "web.yml")
    (tmp_path / "web.yml").write_bytes(b"a: \xff\n")
    with pytest.raises(UsageError, match=r"web configuration .*web\.yml is not UTF-8 text"):
        load_web_config(tmp_path / "web.yml")


def test_the_extra_is_named_where_it_is_missing(written, monkeypatch):
    path = written(f"basic_auth_users:\n  prometheus: {HASH}\n")
    monkeypatch.setitem(sys.modules, "bcrypt", None)
    with pytest.raises(UsageError, match=r"basic_auth_users in .* needs bcrypt: pip install 'warpwatch\[web\]'"):
        check_web_config(path)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UsageError, match=r"needs PyYAML: pip install 'warpwatch\[web\]'"):
        check_web_config(path)


def test_an_agent_without_a_web_configuration_loads_none_of_it():
    wanted = {"yaml", "bcrypt", "exporters.web_access", "exporters.web_tls", "exporters.metrics_dcgm"}
    code = f"import agent.daemon, sys; print(sorted({wanted!r} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert loaded.stdout == "[]\n"


def test_certificates_and_keys_that_cannot_be_used_are_named(tmp_path, written):
    authority = Authority(tmp_path)
    server, key = authority.issue("server", "localhost")
    _, other_key = authority.issue("other", "localhost")
    path = written("tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n")
    check_web_config(path)

    def complaint() -> str:
        with pytest.raises(UsageError) as raised:
            check_web_config(path)
        return str(raised.value)

    right = key.read_bytes()
    key.write_bytes(other_key.read_bytes())
    assert complaint() == f"the key {key} is not the one of the certificate {server}"
    key.write_bytes(b"no key")
    assert complaint().startswith(f"cannot use the certificate {server} with the key {key}: ")
    key.unlink()
    assert complaint() == f"cannot read the key {key}: No such file or directory"
    key.mkdir()
    assert complaint() == f"cannot read the key {key}: Is a directory"
    key.rmdir()
    key.write_bytes(right)
    path.write_text(path.read_text() + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: server.key\n")
    assert complaint().startswith(f"cannot use the client CA {key}: ")
    path.write_text(
        "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n  cipher_suites: [TLS_NULL]\n"
    )
    assert complaint() == f"{path}: tls_server_config.cipher_suites: unknown or unsafe suite 'TLS_NULL'"


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
@pytest.mark.parametrize(
    "more", ["min_version: TLS10", "curve_preferences: [X25519]", "curve_preferences: [CurveP521]"]
)
def test_what_openssl_has_under_another_name(tmp_path, written, more):
    Authority(tmp_path).issue("server", "localhost")
    check_web_config(written(f"tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n  {more}\n"))


@pytest.mark.parametrize("suite", sorted(CIPHER_SUITES))
def test_every_suite_of_the_list_is_one_of_openssls(suite):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers(CIPHER_SUITES[suite])
    assert CIPHER_SUITES[suite] in {cipher["name"] for cipher in context.get_ciphers()}


def test_a_file_that_is_nested_too_deeply(written):
    with pytest.raises(UsageError, match="is nested too deeply"):
        load_web_config(written("[" * 100_000))


def test_a_key_with_a_pass_phrase_is_refused_and_nobody_is_asked_for_it(tmp_path, written):
    from cryptography.hazmat.primitives import serialization

    _, key = Authority(tmp_path).issue("server", "localhost")
    private = serialization.load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(UsageError, match="the key without a pass phrase"):
        check_web_config(written("tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"))
