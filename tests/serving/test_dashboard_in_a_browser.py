"""The page in headless Chromium, of a server that stands still while one looks: who waits, one request's life, keys, sizes and colours."""

import re
from pathlib import Path

import pytest

from .browser import Browser, programs  # noqa: TID252
from .watched import Load, WatchedServer, with_sessions  # noqa: TID252

if programs() is None:
    pytest.skip("needs chromedriver and Chromium on the path", allow_module_level=True)

ESCAPE, ENTER, RIGHT = "\ue00c", "\ue007", "\ue014"
SIZES = [(360, 740), (768, 1024), (1600, 1000)]
LOAD = {"seed": 3, "num_blocks": 128, "num_clients": 24, "longest": 160, "host_blocks": 16}
IS_LIVE = "document.body.dataset.is === 'live'"
CONTRAST = Path(__file__).with_name("contrast.js")
HAS_STORY = "document.querySelectorAll('.timeline li').length > 1"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def load():
    """A load of which some wait, and one of those that are alive was preempted."""
    found = Load(**LOAD)
    while True:
        found.step()
        alive = found.watcher.snapshot().requests
        if any(each.preemptions for each in alive) and found.engine.scheduler.counts()["waiting"] > 3:
            return found


@pytest.fixture(scope="module")
def server(load):
    with WatchedServer(load, every_s=0.1) as found:
        yield found


@pytest.fixture
def page(browser, server):
    """Opens the page, so large, and light or dark; it is shown, and nothing was complained of."""

    def open_page(width, height=900, scheme="light", url=server.url):
        browser.screen(width, height, scheme)
        browser.open(f"{url}/dashboard")
        browser.wait_for(IS_LIVE)
        return browser

    yield open_page
    assert browser.complaints() == []


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_reason_of_the_first_who_waits_is_on_the_first_screen_and_nothing_is_wider(page, load, width, height):
    shown = page(width, height)
    waiting = load.engine.scheduler.waiting_ids()[0]
    reason = load.engine.scheduler.explain(waiting, with_holders=False).reason
    text = shown.wait_for("document.querySelector('.wait li button').innerText")
    assert f"{waiting[:12]}…{waiting[-5:]}" in text
    reason = re.sub('"([^"]{12})[^"]{6,}([^"]{5})"', r'"\1…\2"', reason)
    assert reason[1:].casefold() in " ".join(text.split()).casefold()
    # The whole of it, and none of it cut off.
    box = shown.js(
        "const says = document.querySelector('.wait .says'), box = says.getBoundingClientRect();"
        "return [box.top, box.bottom, says.scrollHeight - says.clientHeight];"
    )
    assert 0 < box[0] < box[1] < height
    assert box[2] <= 0
    assert shown.js("return document.documentElement.scrollWidth") <= width
    shown.click(".wait li button")
    shown.wait_for(HAS_STORY)
    assert shown.js("const story = document.getElementById('story'); return story.scrollWidth - story.clientWidth") <= 0


def test_one_click_opens_a_life_and_escape_closes_it(page, load):
    shown = page(1600)
    waiting = load.engine.scheduler.waiting_ids()[0]
    shown.click(".wait li button")
    assert shown.wait_for(f"document.getElementById('story').open && {HAS_STORY}")
    assert shown.js("return document.getElementById('story-id').textContent") == waiting
    assert load.engine.scheduler.explain(waiting, with_holders=False).reason in shown.js(
        "return document.getElementById('story-why').textContent"
    )
    moments = shown.js("return [...document.querySelectorAll('.timeline li b')].map((each) => each.textContent)")
    assert moments[0] == "came"
    assert moments[1].startswith("waits for")
    assert shown.js("return document.querySelectorAll('.holders li').length") > 0
    shown.press(ESCAPE)
    assert shown.wait_for("!document.getElementById('story').open")


def test_the_life_of_one_that_was_preempted_says_for_what_it_waited(page, load):
    shown = page(1600)
    name = next(each.id for each in load.watcher.snapshot().requests if each.preemptions)
    shown.js(
        "[...document.querySelectorAll('#rows button')].find((each) => each.dataset.id === arguments[0]).click()", name
    )
    detail = shown.wait_for("document.querySelector('.timeline li.hard .detail')?.textContent")
    assert detail == next(
        detail for _, kind, detail in load.watcher.story(name).timeline if kind.startswith("preempted")
    )
    assert shown.js("return document.querySelectorAll('#story-life .away').length") > 0
    widths = "return [...document.querySelectorAll('#story-life i')].reduce((sum, each) => sum + each.getBoundingClientRect().width, 0)"
    assert shown.js(f"{widths} / document.getElementById('story-life').clientWidth") == pytest.approx(1, abs=0.01)
    shown.press(ESCAPE)


def test_a_keyboard_is_enough(page, load):
    shown = page(1600)
    shown.js("document.querySelector('#rows button').focus()")
    first = load.watcher.snapshot().requests[0].id
    shown.press(ENTER)
    opened = shown.wait_for("document.getElementById('story').open && document.getElementById('story-id').textContent")
    assert opened == first
    shown.press(ESCAPE)
    # The focus is where it was, and pictures that came meanwhile have not taken it.
    assert shown.wait_for("!document.getElementById('story').open && document.activeElement.dataset.id") == first
    shown.js("document.getElementById('map-canvas').focus()")
    shown.press(RIGHT)
    shown.press(RIGHT)
    assert shown.wait_for("document.getElementById('map-says').textContent").startswith("Block 1: ")
    assert shown.js("return getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_the_dark_has_another_ground_and_every_text_stands_out(page):
    grounds = {}
    for scheme in ("light", "dark"):
        shown = page(1600, 2000, scheme)
        shown.click("#rows button")
        shown.wait_for(HAS_STORY)
        grounds[scheme] = shown.js("return getComputedStyle(document.body).backgroundColor")
        assert shown.js(CONTRAST.read_text()) == []
        shown.press(ESCAPE)
    assert grounds["light"] != grounds["dark"]


def test_the_map_tells_its_counts_to_who_cannot_see_it_and_what_there_is_not_is_not_shown(page, load):
    shown = page(360)
    for part in ("sessions", "bar-disk-row"):
        assert shown.js(f"return document.getElementById('{part}').getClientRects().length") == 0
    blocks = load.watcher.snapshot().blocks
    label = shown.js("return document.getElementById('map-canvas').getAttribute('aria-label')")
    assert f"{blocks.own} one request's, {blocks.shared} shared, {blocks.cached} cached" in label
    assert shown.js("return document.querySelectorAll('canvas[role=img]:not([aria-label])').length") == 0
    assert shown.js("return document.querySelectorAll('table th:not([scope])').length") == 0
    assert shown.js(
        "return document.querySelector('[aria-live=polite]') !== null && document.querySelector('main') !== null"
    )


def test_the_page_asks_for_a_key_once(page, browser, load):
    with WatchedServer(load, key="of-the-admin", every_s=0.1) as server:
        browser.screen(360, 740)
        browser.open(f"{server.url}/dashboard")
        browser.wait_for("document.body.dataset.is === 'locked'")
        for key in ("another", "of-the-admin"):
            browser.js("document.getElementById('key-value').value = arguments[0]", key)
            browser.click("#key button")
            browser.wait_for("document.getElementById('key-says').textContent === 'That key was not accepted.'")
        browser.wait_for(IS_LIVE)
        page(360, url=server.url)
        # Chromium writes a line of its own for each answer of 401 and 403.
        said = browser.complaints()
        assert len(said) == 2
        assert all("dashboard/feed - Failed to load resource" in each for each in said)


def test_a_server_that_goes_away_is_told_and_found_again(browser, load):
    with WatchedServer(load, every_s=0.1) as server:
        browser.screen(360, 740)
        browser.open(f"{server.url}/dashboard")
        browser.wait_for(IS_LIVE)
        port = int(server.url.rpartition(":")[2])
    browser.wait_for("document.getElementById('link-says').textContent.startsWith('The server is away; again in')")
    assert browser.js("return document.getElementById('told').textContent") == "The server is away"
    with WatchedServer(load, every_s=0.1, port=port):
        browser.wait_for("document.getElementById('link-says').textContent === 'Live'")
    browser.open("about:blank")
    assert all("ERR_CONNECTION" in each or "ERR_INCOMPLETE" in each for each in browser.complaints())


def test_a_running_server_moves_no_part_of_the_page(page):
    top = "return [...document.querySelectorAll('section')].map((each) => [each.id, each.getBoundingClientRect().top])"
    with WatchedServer(Load(**LOAD), every_s=0.1, is_going=True) as server:
        for width, height in SIZES:
            shown = page(width, height, url=server.url)
            shown.wait_for("seen.happened.length >= 50 && seen.steps.length >= 120 && seen.prefixes.length >= 6")
            before, number = shown.js(top), shown.js("return lastEvent")
            shown.wait_for(f"lastEvent > {number} + 60")
            assert shown.js(top) == before
        shown.open("about:blank")  # before its server is gone, of which the page would complain


def test_layers_of_several_kinds_have_a_bar_each(page):
    load = Load(seed=4, is_hybrid=True, num_blocks=120, host_blocks=0, num_clients=9, longest=60)
    for _ in range(40):
        load.step()
    groups = load.watcher.snapshot().groups
    with WatchedServer(load, every_s=0.1) as server:
        for width in (360, 1600):
            shown = page(width, url=server.url)
            assert shown.js("return document.documentElement.scrollWidth") <= width
            bars = shown.js("return [...document.querySelectorAll('#bar-groups .bar')].map((each) => each.innerText)")
            full, state = (" ".join(each.split()) for each in bars)
            assert full == f"full {groups[0].used} pages used, {groups[0].cached} cached"
            assert state == (
                f"state {groups[1].used} pages used, {groups[1].cached} cached, {groups[1].lost_tokens} hit tokens lost"
            )
            assert shown.js("return document.getElementById('map-title').textContent") == "Device pages"
        shown.open("about:blank")


def test_sessions_say_where_their_content_is_and_for_how_long_it_is_kept(page, tmp_path):
    load = with_sessions(tmp_path)
    seen = load.watcher.snapshot()
    with WatchedServer(load, every_s=0.1) as server:
        for width in (360, 768, 1600):
            shown = page(width, url=server.url)
            assert shown.js("return document.documentElement.scrollWidth") <= width
        cells = shown.js(
            "return [...document.querySelectorAll('#session-rows tr')].map((row) => [...row.children].map((each) => each.textContent))"
        )
        assert [row[0] for row in cells] == [each.id for each in seen.sessions] == ["reader", "agent 1", "agent 0"]
        reader, tool, first = cells
        assert reader[2].startswith("○waits for a person, in about ")
        assert tool[1:3] == ["research", "●runs"]
        assert first[2].startswith("○waits for a tool, in about ")
        session = seen.sessions[2]
        gone = session.blocks - session.device_blocks - session.host_blocks
        places = [session.device_blocks, session.host_blocks, gone, session.pinned_blocks]
        assert [int(each) for each in first[3:7]] == places
        assert (first[7], reader[7]) == ("2", "1")
        assert reader[9].endswith(" min")
        disk = shown.js("return document.getElementById('bar-disk-says').textContent")
        assert disk.startswith(f"{seen.disk.blocks} blocks")
        device = shown.js("return document.getElementById('bar-device-says').textContent")
        assert device.endswith(f"{seen.pinned} blocks pinned")
        shown.open("about:blank")
    load.engine.close()
