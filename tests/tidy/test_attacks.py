"""Every known attack on the way out has a test that proves a requirement (tests/promises/attacks.toml)."""

import tomllib

from tests.tidy.sources import ROOT, report
from tools.evidence import marked_tests

TABLE = ROOT / "tests" / "promises" / "attacks.toml"
FIELDS = {"id", "attempt", "expected", "test"}
ROWS = (*(f"N{n}" for n in range(1, 15)), *(f"S{n}" for n in range(1, 6)), "A1", "A4")
NAMED = (
    "sockets-of-every-family",
    "udp-quic-icmp",
    "address-spellings",
    "metadata-alias",
    "rebinding",
    "sni-mismatch",
    "sni-missing",
    "smuggling-plain",
    "smuggling-downgrade",
    "connect-inside",
    "absolute-form",
    "userinfo",
    "look-alikes",
    "long-labels",
    "placeholder-elsewhere",
    "secret-echoed",
    "name-changes-after-approval",
    "metadata-address",
    "host-header",
    "authority",
    "smuggling-tls",
    "another-sandbox",
    "half-open",
    "slow-loris",
    "endless-headers",
    "S2-split",
    "A1-reuse",
    "cloned-repository",
    "N13-crash",
    "interceptor-killed",
    "S5-copy",
)


def _attacks() -> list[dict[str, str]]:
    found: list[dict[str, str]] = tomllib.loads(TABLE.read_text())["attack"]
    return found


def test_no_attack_is_missing() -> None:
    known = [attack["id"] for attack in _attacks()]
    missing = [f"{wanted} is not there" for wanted in (*ROWS, *NAMED) if wanted not in known]
    twice = [f"{each} is there twice" for each in sorted(set(known)) if known.count(each) > 1]
    report(missing + twice, "Complete tests/promises/attacks.toml.")


def test_each_attack_has_a_test_of_a_requirement() -> None:
    proving = {test for tests in marked_tests().values() for test in tests}
    problems = []
    for attack in _attacks():
        name = attack.get("id", "?")
        if set(attack) != FIELDS or not all(attack.values()):
            problems.append(f"{name}: an entry has exactly {', '.join(sorted(FIELDS))}")
        elif attack["test"] not in proving:
            problems.append(f"{name}: {attack['test']} does not exist, or no @pytest.mark.req is on it")
    report(problems, "Write the test, or mark it with the requirement that it proves.")
