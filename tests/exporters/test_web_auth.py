"""Basic authentication: who comes in, what guessing costs, and that no guesser keeps a right client out."""

from __future__ import annotations

import base64
import http.client
import threading
from contextlib import closing, contextmanager

import bcrypt
import pytest

from exporters.web import WebApp, WebServer
from exporters.web_access import WebAccess
from exporters.web_auth import AuthLimits, BasicAuth, Verdict, parse_basic
from exporters.web_config import password_checker
from tests.exporters.snapshots import full_snapshot


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def hashed(password: str) -> bytes:
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(4))


USERS = {"prometheus": hashed("right"), "grafana": hashed("other")}
RIGHT = basic("prometheus", "right")
HERE, THERE = "192.0.2.1", "192.0.2.2"


class Auth:
    """Counts what is checked, with a clock set by hand."""

    def __init__(self, tmp_path, **limits) -> None:
        self.now_s = 100.0
        self.checks = 0
        check = password_checker(tmp_path)

        def counted(password: bytes, hash_: bytes) -> bool:
            self.checks += 1
            return check(password, hash_)

        self.auth = BasicAuth(counted, AuthLimits(**limits), lambda: self.now_s)

    def __call__(self, header: str | None, address: str = HERE, users=USERS) -> Verdict:
        return self.auth.verdict(users, header, address)

    def guess(self, number: int, address: str) -> list[Verdict]:
        return [self(basic("prometheus", f"guess {index}"), address) for index in range(number)]


@pytest.fixture
def auth(tmp_path):
    return lambda **limits: Auth(tmp_path, **limits)


def test_a_right_password_is_verified_once(auth):
    auth = auth()
    assert [auth(RIGHT) for _ in range(100)] == [Verdict.ALLOWED] * 100
    assert auth.checks == 1
    assert auth(basic("grafana", "other")) is Verdict.ALLOWED
    assert auth(RIGHT) is Verdict.ALLOWED
    assert auth.checks == 2


@pytest.mark.parametrize(
    "header",
    [
        basic("prometheus", "wrong"),
        basic("prometheus", ""),
        basic("prometheus", "right\0"),
        basic("nobody", "right"),
        basic("", ""),
        basic("grafana", "right"),
    ],
)
def test_wrong_ones_are_denied(auth, header):
    assert auth()(header) is Verdict.DENIED


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Basic",
        "Basic !",
        "Bearer abc",
        "Basic " + base64.b64encode(b"\xff:x").decode(),
        "Basic eHg=",
        RIGHT * 99,
    ],
)
def test_what_is_no_password_costs_no_check(auth, header):
    auth = auth()
    assert [auth(header) for _ in range(50)] == [Verdict.DENIED] * 50
    assert auth.checks == 0


def test_a_password_may_hold_colons_and_any_bytes():
    assert parse_basic("basic " + base64.b64encode(b"us\xc3\xa9r:a:b\xff").decode()) == ("usér", b"a:b\xff")


def test_only_the_first_72_bytes_of_a_password_are_in_a_bcrypt_hash(auth):
    long = "x" * 72
    users = {"prometheus": hashed(long)}
    assert auth()(basic("prometheus", long + "whatever"), users=users) is Verdict.ALLOWED
    assert auth()(basic("prometheus", long[:-1]), users=users) is Verdict.DENIED


def test_an_unknown_user_costs_the_same_check(auth):
    auth = auth()
    auth(basic("nobody", "x"))
    assert auth.checks == 1


def test_the_same_wrong_password_again_costs_nothing(auth):
    auth = auth()
    assert [auth(basic("prometheus", "old")) for _ in range(100)] == [Verdict.DENIED] * 100
    assert auth.checks == 1


def test_guessing_is_slow(auth):
    auth = auth(address_failures=5, address_interval_s=2.0)
    assert auth.guess(8, HERE) == [Verdict.DENIED] * 5 + [Verdict.LATER] * 3
    assert auth.checks == 5
    auth.now_s += 4.0  # two more
    assert [auth(basic("grafana", str(index))) for index in range(3)] == [Verdict.DENIED] * 2 + [Verdict.LATER]


def test_a_guesser_locks_out_neither_other_addresses_nor_who_was_verified_at_its_own(auth):
    auth = auth()
    assert auth(RIGHT, HERE) is Verdict.ALLOWED
    auth.guess(20, HERE)
    auth.guess(20, "192.0.2.3")
    assert auth(RIGHT, HERE) is Verdict.ALLOWED
    assert auth(RIGHT, THERE) is Verdict.ALLOWED
    # A new password of a client whose address was right before is checked, whatever others do.
    assert auth(basic("grafana", "other"), THERE) is Verdict.ALLOWED


def test_guesses_from_very_many_addresses_cost_a_bounded_number_of_checks(auth):
    auth = auth(unknown_checks=8, unknown_interval_s=0.5)
    assert auth(RIGHT, HERE) is Verdict.ALLOWED
    for index in range(5000):
        auth(basic("prometheus", str(index)), f"198.51.{index // 250}.{index % 250}")
    assert auth.checks == 8
    assert auth(RIGHT, HERE) is Verdict.ALLOWED
    assert auth(basic("grafana", "other"), HERE) is Verdict.ALLOWED


def test_one_ipv6_host_is_one_client_with_all_its_addresses(auth):
    auth = auth(address_failures=5)
    verdicts = [auth(basic("prometheus", str(index)), f"2001:db8::{index:x}") for index in range(7)]
    assert verdicts == [Verdict.DENIED] * 5 + [Verdict.LATER] * 2
    # As a socket for both families shows an IPv4 address.
    assert [auth(basic("a", str(index)), f"::ffff:{THERE}") for index in range(3)] == [Verdict.DENIED] * 3
    assert [auth(basic("b", str(index)), THERE) for index in range(3)] == [Verdict.LATER] * 3


def test_a_changed_hash_ends_what_was_verified(auth):
    auth = auth()
    assert auth(RIGHT) is Verdict.ALLOWED
    changed = {"prometheus": hashed("new")}
    assert auth(RIGHT, users=changed) is Verdict.DENIED
    assert auth(basic("prometheus", "new"), users=changed) is Verdict.ALLOWED
    assert auth(basic("grafana", "other"), users=changed) is Verdict.DENIED


def test_checks_that_take_long_hold_up_two_threads_at_most():
    begun, goes_on = threading.Semaphore(0), threading.Event()

    def slow(_password: bytes, _hashed: bytes) -> bool:
        begun.release()
        assert goes_on.wait(10)
        return False

    auth = BasicAuth(slow, AuthLimits(wait_s=10))
    verdicts: list[Verdict] = []

    def guess(name: str) -> None:
        verdicts.append(auth.verdict(USERS, basic(name, "x"), HERE))

    threads = [threading.Thread(target=guess, args=(name,)) for name in ("a", "b")]
    threads[0].start()
    assert begun.acquire(timeout=10)
    threads[1].start()
    while auth._places._value:  # until the second one waits
        pass
    assert auth.verdict(USERS, basic("c", "x"), HERE) is Verdict.LATER
    goes_on.set()
    for thread in threads:
        thread.join(10)
    assert verdicts == [Verdict.DENIED] * 2


@contextmanager
def serving(tmp_path, text: str):
    (tmp_path / "web.yml").write_text(text, encoding="utf-8")
    access = WebAccess(tmp_path / "web.yml")
    snapshot = full_snapshot()
    server = WebServer(WebApp(lambda: snapshot), "127.0.0.1", 0, access=access)
    server.start()

    def get(path: str = "/metrics", method: str = "GET", **headers: str):
        with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as connection:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response.status, response.headers, response.read()

    try:
        yield get, access
    finally:
        server.stop()


def test_every_page_asks_for_the_password(tmp_path):
    text = "basic_auth_users:\n" + "".join(f"  {name}: {value.decode()}\n" for name, value in USERS.items())
    with serving(tmp_path, text) as (get, access):
        for path in ("/", "/metrics", "/-/healthy", "/-/ready", "/none"):
            status, headers, body = get(path)
            assert (status, headers["WWW-Authenticate"]) == (401, 'Basic realm="warpwatch", charset="UTF-8"')
            assert headers["Content-Length"] == str(len(body))
            assert b"GPU" not in body
        assert get(method="HEAD")[::2] == (401, b"")
        assert get(Authorization=RIGHT)[0] == 200
        statuses = [get(Authorization=basic("prometheus", str(index)))[0] for index in range(8)]
        assert statuses[:5] == [401] * 5
        assert statuses[-1] == 429
        assert get(Authorization=basic("x", "y"))[1]["Retry-After"] == "2"
        assert get(Authorization=RIGHT)[0] == 200
        (tmp_path / "web.yml").write_text(f"basic_auth_users:\n  grafana: {USERS['grafana'].decode()}\n")
        access.refresh()
        assert get(Authorization=RIGHT)[0] in {401, 429}


def test_passwords_without_tls_are_warned_of(tmp_path, caplog):
    path = tmp_path / "web.yml"
    path.write_text(f"basic_auth_users:\n  grafana: {USERS['grafana'].decode()}\n", encoding="utf-8")
    WebAccess(path)
    assert caplog.messages == [f"{path} asks for passwords without tls_server_config: whoever is on the way reads them"]


def test_headers_of_the_file_take_the_place_of_ours(tmp_path):
    headers = "    Strict-Transport-Security: max-age=60\n    Content-Security-Policy: sandbox\n"
    with serving(tmp_path, "http_server_config:\n  headers:\n" + headers) as (get, _):
        _, sent, _ = get()
        assert sent["Strict-Transport-Security"] == "max-age=60"
        assert sent["Content-Security-Policy"] == "sandbox"
        assert sent["X-Content-Type-Options"] == "nosniff"


def test_a_rate_limit_holds_for_all_requests(tmp_path):
    with serving(tmp_path, "rate_limit:\n  interval: 1h\n  burst: 2\n") as (get, _):
        assert [get()[0] for _ in range(3)] == [200, 200, 429]
