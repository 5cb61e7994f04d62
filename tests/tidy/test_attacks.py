"""Every known attack on the way out has a test that proves a requirement, and that fails without the defence (attacks.toml)."""

import importlib
import tomllib
from typing import Any

from tests.defects.catalogue import DEFECTS
from tests.tidy.sources import ROOT, report
from tools.defects import is_of
from tools.evidence import marked_tests

TABLE = ROOT / "tests" / "promises" / "attacks.toml"
FIELDS = {"id", "attempt", "expected", "test", "defence"}
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
    "S1-checkpoint",
)


def _attacks() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads(TABLE.read_text())["attack"]
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
        elif attack["test"].partition("[")[0] not in proving:
            problems.append(f"{name}: {attack['test']} does not exist, or no @pytest.mark.req is on it")
        elif not _is_a_case(attack["test"]):
            problems.append(f"{name}: {attack['test']} is no case of that test")
    report(problems, "Write the test, or mark it with the requirement that it proves.")


def _is_a_case(test: str) -> bool:
    """Whether the part in brackets, if there is one, is a value of the test's only parameter."""
    name, bracket, case = test.partition("[")
    if not bracket:
        return True
    path, _, function = name.partition("::")
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    marks = getattr(module, function).pytestmark
    return any(mark.name == "parametrize" and case.removesuffix("]") in mark.args[1] for mark in marks)


def test_each_attack_gets_through_when_its_defence_is_switched_off() -> None:
    """`just defects` shows it; here is seen that it will."""
    tests = {defect.id: defect.tests for defect in DEFECTS}
    problems = []
    for attack in _attacks():
        for defence in attack["defence"]:
            if defence not in tests:
                problems.append(f"{attack['id']}: {defence} is not in the catalogue of planted defects")
            elif not all(is_of(test, attack["test"]) for test in tests[defence]):
                problems.append(f"{attack['id']}: {defence} is tried with another test than {attack['test']}")
    named = (test for each in tests.values() for test in each)
    problems += [f"{test} is no case of that test" for test in named if not _is_a_case(test)]
    report(problems, "Plant the defect in tests/defects/, and let it name the attack's own test and no other.")
