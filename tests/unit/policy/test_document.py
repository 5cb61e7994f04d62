"""The organisation's file: what it means, and that every doubt in it is an error with its line."""

import re
from ipaddress import ip_address
from pathlib import Path

import pytest

from cloche.wire import defaults
from cloche.wire.egress import EgressLimits
from cloche.wire.errors import ClocheError
from cloche_server.policy import decide, document
from cloche_server.policy.document import Organisation, Webhook, load
from cloche_server.policy.model import Effect
from cloche_server.policy.yaml_tree import BadYaml, parse
from tests.unit.policy.policies import policy, presets, to

WHOLE = """\
version: 1
default: ask
deny:
  - bad.example
  - {host: "*.bad.example", methods: [POST]}
allow:
  - mirror.example
  - host: ask.example
    effect: ask
offer:
  - preset: some
  - host: api.example.com
    methods: [GET]
    paths: ["/repos/**"]
  - db.example.com:5432
addresses: [10.0.0.7, "127.0.0.1:5432", "[fd00::1]:80", fd00::2]
hosts:
  db.example.com: 10.0.0.7
intercept: always
ech: refuse
approvals:
  timeout_s: 60
  scope_s_max: 300
  webhook: {url: "https://hooks.example/cloche", key_file: hook.key}
nameservers: [10.0.0.2, "10.0.0.3:5353"]
ca_file: ca.pem
limits: {connections: 16, attempts_per_s: 5.5, bytes_per_s: 100000}
"""


def loaded(tmp_path: Path, text: str) -> Organisation:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    return load(path, presets=presets)


@pytest.mark.req("POL-1")
def test_the_whole_form(tmp_path: Path) -> None:
    org = loaded(tmp_path, WHOLE)
    assert [rule.id for rule in org.deny] == ["deny[0]", "deny[1]"]
    assert {rule.effect for rule in org.deny} == {Effect.DENY}
    assert [rule.effect for rule in org.allow] == [Effect.ALLOW, Effect.ASK]
    assert org.offer is not None
    assert [rule.id for rule in org.offer] == ["offer[0]/some[0]", "offer[0]/some[1]", "offer[1]", "offer[2]"]
    assert [rule.source for rule in org.offer] == ["preset some", "preset some", "policy.yaml:12", "policy.yaml:15"]
    assert org.default is Effect.ASK
    assert org.addresses == {
        (ip_address("10.0.0.7"), None),
        (ip_address("127.0.0.1"), 5432),
        (ip_address("fd00::1"), 80),
        (ip_address("fd00::2"), None),
    }
    assert org.hosts == {"db.example.com": ip_address("10.0.0.7")}
    assert (org.intercept, org.ech) == ("always", "refuse")
    assert (org.approval_s, org.approval_scope_s_max) == (60, 300)
    assert org.webhook == Webhook("https://hooks.example/cloche", tmp_path / "hook.key")
    assert org.nameservers == (("10.0.0.2", 53), ("10.0.0.3", 5353))
    assert org.ca_file == tmp_path / "ca.pem"
    assert org.limits == EgressLimits(connections=16, attempts_per_s=5.5, bytes_per_s=100000)
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", org.digest)


@pytest.mark.req("POL-1")
@pytest.mark.req("NET-2")
def test_without_a_file_nothing_is_allowed(tmp_path: Path) -> None:
    for org in (load(None), load(tmp_path / "none.yaml"), loaded(tmp_path, ""), loaded(tmp_path, "# nothing\n")):
        assert (org.deny, org.allow, org.offer, org.default) == ((), (), None, Effect.DENY)
        assert org.addresses == frozenset()
        assert org.approval_s == defaults.APPROVAL_S
        assert org.approval_scope_s_max is None
        assert policy(org=org).connect(to("a.example:443")).effect is Effect.DENY


@pytest.mark.req("POL-1")
def test_its_digest_is_its_version(tmp_path: Path) -> None:
    first, again, other = (
        loaded(tmp_path, text) for text in ("deny: [a.example]", "deny: [a.example]", "deny: [b.example]")
    )
    assert first.digest == again.digest != other.digest
    assert policy("c.example", org=first).digest != policy("c.example", org=other).digest


def test_a_limit_that_the_file_does_not_name_is_no_limit(tmp_path: Path) -> None:
    org = loaded(tmp_path, "limits: {bytes_total: 5}")
    assert org.limits == EgressLimits(
        connections=defaults.EGRESS_CONNECTIONS_MAX, attempts_per_s=10_000, bytes_total=5, bytes_per_s=None
    )


@pytest.mark.req("NET-4")
def test_exceptions_are_exact(tmp_path: Path) -> None:
    org = loaded(tmp_path, 'addresses: [10.0.0.7, "127.0.0.1:5432"]')
    assert org.excepts(ip_address("10.0.0.7"), 1)
    assert org.excepts(ip_address("127.0.0.1"), 5432)
    assert not org.excepts(ip_address("127.0.0.1"), 5433)
    assert not org.excepts(ip_address("10.0.0.8"), 1)
    assert not org.excepts(ip_address("::ffff:10.0.0.7"), 1)


@pytest.mark.req("POL-1")
@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("version: 2", 1, "is not 1"),
        ("\ndenny: []", 2, "'denny' is not known"),
        ("deny: a.example", 1, "is not a list"),
        ("allow:", 1, "is not a list"),
        ("offer: {}", 1, "is not a list"),
        ("default: allow", 1, "not one of: deny, ask"),
        ("default: [deny]", 1, "not one of"),
        ("intercept: no", 1, "not one of"),
        ("ech: true", 1, "not one of"),
        ("allow:\n  - a.example\n  - '*'", 3, "never allowed"),
        ("allow:\n  - a.example\n  - {host: a.example, port: 1}", 3, "port"),
        ("allow:\n  - a.example\n  - {host: 5}", 3, "host"),
        ("allow:\n  - 5", 2, "a text or a mapping"),
        ("allow:\n  - [a.example]", 2, "a text or a mapping"),
        ("allow: [deny:a.example]", 1, "stands below `deny`"),
        ("offer:\n  - {host: a.example, effect: deny}", 2, "stands below `deny`"),
        ("deny:\n\n  - 127.0.1", 3, "is a number"),
        ("addresses: [10.0.0.0/8]", 1, "no name of a host"),
        ("addresses: [db.example.com]", 1, "one address, by number"),
        ("addresses: ['0x7f.1']", 1, "is a number"),
        ("addresses: [10.0.0.7:0]", 1, "port"),
        ("addresses: [10]", 1, "list of texts"),
        ("hosts:\n  a.example: b.example", 2, "one address, by number"),
        ("hosts:\n  10.0.0.1: 10.0.0.2", 2, "is an address"),
        ("hosts:\n  a.example: 10.0.0.1:80", 2, "without a port"),
        ("approvals: {timeout: 5}", 1, "'timeout' is not known"),
        ("approvals: {timeout_s: 0}", 1, "not above 0"),
        ("approvals: {timeout_s: soon}", 1, "is not a number"),
        ("approvals: {timeout_s: true}", 1, "is not a number"),
        ("approvals: {scope_s_max: 601}", 1, "at most 600"),
        ("approvals: {webhook: {url: 'ftp://x'}}", 1, "is not https://"),
        ("approvals: {webhook: {url: 'https://a:b@x/'}}", 1, "is not https://"),
        ("approvals: {webhook: {url: 'https://x/'}}", 1, "is missing"),
        ("nameservers: []", 1, "is empty"),
        ("nameservers: [ns.example]", 1, "by number"),
        ("limits: {connections: 0}", 1, "connections"),
        ("limits: {speed: 1}", 1, "speed"),
        ("- a", 1, "not a mapping"),
        ("a", 1, "not a mapping"),
        ("deny: [a.example]\ndeny: []", 2, "a second time"),
        ("deny: &x [a.example]", 1, "anchors"),
        ("deny: *x", 1, "aliases"),
        ("deny: !!python/object:os.system []", 1, "tags"),
        ("version: !!int '1'", 1, "tags"),
        ("deny: []\n---\ndeny: []", 2, "second document"),
        ("? [a]\n: b", 1, "key is not a text"),
        ("deny: [", 1, "expected"),
        ("deny:\n\t- a", 2, "cannot start any token"),
        ("a: " + "[" * 30 + "]" * 30, 1, "too deeply"),
        ("a: [" + "1, " * 30000 + "]", 1, "more than"),
        ("a: \x01", 1, "special characters"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, text: str, line: int, why: str) -> None:
    with pytest.raises(ClocheError) as refused:
        loaded(tmp_path, text)
    assert refused.value.code == "policy_invalid"
    assert refused.value.message.startswith(f"{tmp_path / 'policy.yaml'}:{line}: ")
    assert why in refused.value.message
    assert refused.value.message.isprintable()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ClocheError, match="cannot be read"):
        load(tmp_path)
    path = tmp_path / "policy.yaml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ClocheError, match="not UTF-8"):
        load(path)
    path.write_bytes(b"#" * (1024 * 1024 + 1))
    with pytest.raises(ClocheError, match="more than"):
        load(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: no", "no"),
        ("a: on", "on"),
        ("a: 12:30", "12:30"),
        ("a: 0o17", "0o17"),
        ("a: 017", "017"),
        ("a: 0x10", "0x10"),
        ("a: 1_000", "1_000"),
        ("a: 1e3", "1e3"),
        ("a: .inf", ".inf"),
        ("a: 2026-11-15", "2026-11-15"),
        ("a: '5'", "5"),
        ("a: 5", 5),
        ("a: -5", -5),
        ("a: 5.5", 5.5),
        ("a: true", True),
        ("a: 'true'", "true"),
        ("a: null", None),
        ("a: <<", "<<"),
    ],
)
def test_plain_words_are_texts(text: str, value: object) -> None:
    tree = parse(text)
    assert isinstance(tree.value, dict)
    assert tree.value["a"].value == value
    assert type(tree.value["a"].value) is type(value)


def test_a_bomb_is_refused_early() -> None:
    with pytest.raises(BadYaml):
        parse("a: &a [x]\nb: &b [*a,*a]\nc: [*b,*b]")


PAGE = Path(__file__).parents[3] / "docs" / "reference" / "policy.md"


@pytest.mark.req("POL-1")
def test_the_example_of_the_documentation_loads(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "policy.yaml"
    path.write_text(example)
    org = load(path, presets=lambda name: presets("some"))
    assert {"deny[0]", "allow[0]", "offer[0]/python-packages[0]"} <= {
        rule.id for rule in (*org.deny, *org.allow, *(org.offer or ()))
    }
    keys = set(re.findall(r"^([a-z_]+):", example, re.MULTILINE))
    assert keys == document._KEYS


def test_every_code_is_documented() -> None:
    source = Path(decide.__file__).read_text()
    codes = set(re.findall(r'"(allowed|ask|[a-z]+_[a-z_]+)"', source)) - {"the_request"}
    known = {each for each in codes if f"`{each}`" in PAGE.read_text()}
    assert {"no_rule", "path_refused", "needs_name"} <= codes
    assert codes == known
