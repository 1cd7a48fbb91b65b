"""The page about ``run why`` has a transcript for each code, and servers still say the same."""

from __future__ import annotations

from stanchion.core.why import WhyCode
from tests.acceptance.stack import ADMIN_KEY, Kind, running_stack
from tests.console.scene import Scene
from tests.docs.transcripts import QUICK, TENANT, foretold, on_page, said, shape


def test_every_code_has_a_transcript_whose_first_cause_it_is() -> None:
    page = on_page()
    assert set(page) == {str(code) for code in WhyCode}
    assert shape(foretold()) == shape(page["suspended"])
    for code, text in page.items():
        command, first, todo, *_ = text.splitlines()
        assert command.startswith("$ stanchion run why "), code
        assert first.endswith(f"({code})")
        assert todo.startswith("to do: "), code


def test_servers_say_what_the_page_says() -> None:
    page = on_page()
    with running_stack(Kind.SQLITE, admin_key=ADMIN_KEY, job_lease_ttl_s=20.0) as stack:
        scene = Scene(stack)
        scene.tenant(TENANT, 100)
        told = {code: story(scene) for code, story in QUICK.items()}
        for code, run_id in told.items():
            assert shape(said(scene.url, run_id, code)) == shape(page[code])
        scene.close()
