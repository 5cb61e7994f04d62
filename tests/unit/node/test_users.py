"""The agent's own user is nobody's, in every way of writing it."""

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.node.files import fields_of
from cloche_server.node.users import check_user


@pytest.mark.req("ISO-8")
@pytest.mark.parametrize("user", ["64000", "064000", "64000:0", "0:64000", "root:64000", "64000:staff", "00064000:1"])
def test_the_agents_own_ids_are_refused_by_name(user: str) -> None:
    for ask in (check_user, lambda each: fields_of("/tmp/x", each)):
        with pytest.raises(ClocheError) as refused:
            ask(user)
        assert refused.value.code == "no_such_user"


@pytest.mark.parametrize("user", [None, "", "root", "0", "0:0", "1000:1000", "640000", "6400", "64001:1", "agent64000"])
def test_all_others_are_left_to_the_guest(user: str | None) -> None:
    check_user(user)
