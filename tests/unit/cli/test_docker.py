"""What Docker has and a sandbox must not have is answered, not obeyed."""

import pytest

pytestmark = pytest.mark.req("UX-7")


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        (("-v", "/:/host"), "cloche cp"),
        (("--volume", "/:/host"), "cloche cp"),
        (("--volume=/:/host",), "cloche cp"),
        (("--mount", "type=bind,src=/,dst=/host"), "cloche cp"),
        (("-p", "80:80"), "cloche port"),
        (("--network", "host"), "no network interface"),
        (("--privileged",), "lowers"),
        (("--cap-add", "SYS_ADMIN"), "lowers"),
        (("-d",), "cloche create"),
    ],
)
def test_it_says_what_to_use(node, cloche, option, instead) -> None:
    for verb in ("run", "create", "shell"):
        result = cloche(verb, *option, *(("python", "--", "true") if verb != "shell" else ()))
        assert result.exit_code == 2, verb
        assert instead in result.stderr
    assert not node.created


def test_behind_the_dashes_nothing_is_ours(node, cloche) -> None:
    assert cloche("run", "--", "ls", "-v", "--privileged", "--", "-d").exit_code == 0
    assert node.created[0].command.argv == ["ls", "-v", "--privileged", "--", "-d"]
