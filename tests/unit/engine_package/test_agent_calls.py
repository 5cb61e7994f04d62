"""The agent's calls that move bytes are in the form that gVisor's systrap replaces by a jump (guest-agent/agent/src/calls.rs)."""

from pathlib import Path

import pytest

import cloche_engine

AGENT = Path(cloche_engine.__file__).parent / "bin" / "cloche-guest-x86_64"
SYSCALL = b"\x0f\x05"
NUMBERS = {"read": 0, "write": 1, "sendto": 44, "recvfrom": 45, "epoll_wait": 232}


@pytest.mark.skipif(not AGENT.is_file(), reason="no agent was built here")
@pytest.mark.parametrize("name", NUMBERS)
def test_the_number_is_loaded_right_before_the_call(name: str) -> None:
    code = b"\xb8" + NUMBERS[name].to_bytes(4, "little") + SYSCALL
    assert code in AGENT.read_bytes()
