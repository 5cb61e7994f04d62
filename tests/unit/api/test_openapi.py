from __future__ import annotations

import json

import pytest

from cloche.wire.commands import StartCommand
from tools import openapi


@pytest.mark.req("UX-2")
def test_the_frozen_description_is_the_live_one() -> None:
    assert openapi.FROZEN.read_text() == openapi.rendered(), (
        "run tools/openapi.py, and say in the changelog what changed"
    )


def test_every_reference_leads_somewhere_and_every_error_is_a_problem() -> None:
    document = json.loads(openapi.rendered())
    text = json.dumps(document)
    schemas = document["components"]["schemas"]
    for part in text.split('"#/components/schemas/')[1:]:
        assert part.split('"')[0] in schemas
    for operations in document["paths"].values():
        for operation in operations.values():
            assert "application/problem+json" in operation["responses"]["default"]["content"]
            assert "422" not in operation["responses"]


def test_the_hot_routes_are_described_as_what_they_take() -> None:
    document = json.loads(openapi.rendered())
    start = document["paths"]["/v1/sandboxes/{s}/commands"]["post"]
    assert start["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/StartCommand")
    assert set(document["components"]["schemas"]["StartCommand"]["properties"]) == set(StartCommand.model_fields)
    names = {one["name"] for one in document["paths"]["/v1/sandboxes/{s}/commands/{c}/output"]["get"]["parameters"]}
    assert names == {"s", "c", "from", "follow", "fd", "Last-Event-ID"}
