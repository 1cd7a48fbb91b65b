"""Which endpoint a path means."""

from __future__ import annotations

import pytest

from stanchion.gateway.app import Paths
from stanchion.gateway.routes import ROUTES

PATHS = Paths(
    {
        "/livez": "live",
        "/v1/runs": "list",
        "/v1/runs/{run_id}": "run",
        "/v1/runs/{run_id}/steps/{step_id}/approve": "approve",
        "/v1/admin/leases/{name}": "lease",
    }
)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/livez", ("live", {})),
        ("/v1/runs", ("list", {})),
        ("/v1/runs/17", ("run", {"run_id": "17"})),
        ("/v1/runs/17/steps/a b/approve", ("approve", {"run_id": "17", "step_id": "a b"})),
        ("/v1/runs/{run_id}", ("run", {"run_id": "{run_id}"})),
    ],
)
def test_a_path_is_found_with_its_parameters(path: str, found: tuple[str, dict[str, str]]) -> None:
    assert PATHS.find(path) == found


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", "*", "livez", "/livez/", "//livez", "/v1", "/v1/runs/", "/v1/runs/17/"),
        *("/v1/runs/17/steps", "/v1/runs//steps/a/approve", "/v1/runs/17/steps/a/approve/b"),
    ],
)
def test_what_is_not_in_the_table_is_not_found(path: str) -> None:
    assert PATHS.find(path) is None


def test_a_parameter_that_may_have_slashes_is_left_to_others() -> None:
    assert PATHS.left_out == ["/v1/admin/leases/{name}"]
    assert PATHS.find("/v1/admin/leases/run") is None


def test_a_word_and_a_parameter_in_the_same_place_are_refused() -> None:
    with pytest.raises(AssertionError, match="is ambiguous"):
        Paths({"/v1/runs/{run_id}": "run", "/v1/runs/newest": "newest"})


def test_every_route_is_found_or_left_out() -> None:
    paths = Paths({route.path: route.path for route in ROUTES})
    for route in ROUTES:
        found = paths.find(route.path)
        assert (found is None) == (route.path in paths.left_out), route.path
        assert found is None or found[0] == route.path
