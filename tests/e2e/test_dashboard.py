"""The dashboard as people see it: a real browser against a real server that learns. `make test-long` only."""

import dataclasses

import httpx
import pytest

from livedraft.drafts.registry import Registry, new_version_id
from livedraft.drafts.weights import save_draft
from tests.e2e.browser import AXE, Browser, why_not
from tests.e2e.server_process import TINY_ENVIRONMENT, ServerProcess
from tests.learning.toy import one_layer_draft
from tests.server.test_admin import publish

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]
KEY = "operator's key"
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
# What axe calls serious or critical; `null` until it has run.
SCAN = """
const done = arguments[arguments.length - 1];
axe.run(document, { resultTypes: ["violations"] }).then((found) => done(found.violations
  .filter((one) => ["serious", "critical"].includes(one.impact))
  .map((one) => `${one.id}: ${one.help}: ${one.nodes.map((node) => node.html + " " + node.failureSummary).join(" | ")}`)));
"""
CURVE = "return document.querySelector('#acceptance-chart').getAttribute('aria-label')"
BARS = """
const widths = (selector) => [...document.querySelectorAll(selector)].map((e) => e.getBoundingClientRect().width);
return [widths("#positions .bar span"), widths("#positions .bar")[0]];
"""
PIXELS = """
const canvas = document.querySelector("#acceptance-chart canvas");
const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
let sum = 0;
for (let i = 0; i < data.length; i += 4) sum = (sum * 31 + data[i] + 7 * data[i + 1] + 13 * data[i + 3]) % 1000003;
return sum;
"""


def ask(url, count, first=0, **more):
    for number in range(first, first + count):
        body = {"model": "m", "prompt": f"question {number % 12}", "max_tokens": 64, "ignore_eos": True, **more}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200


def is_a_count(text):
    """As the page writes one: 1,008."""
    return text.replace(",", "").isdigit()


def serve(model_folder, *arguments):
    return ServerProcess(model_folder, "--served-model-name", "m", "--dtype", "float32", *arguments, **TINY_ENVIRONMENT)


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory):
    state = tmp_path_factory.mktemp("state")
    # A tiny random model repeats itself, and its draft costs as much as it does: by itself the engine would never ask it.
    settings = state / "settings.toml"
    settings.write_text(
        "[speculation]\nsuffix_decoding = false\nnum_speculative_tokens = 3\n[learning]\ntraces_per_candidate = 8\n"
    )
    arguments = ("--state", state, "--admin-key", KEY, "--learn", "eager", "--config", settings)
    with serve(model_folder, *arguments) as running:
        running.state = state
        yield running


@pytest.fixture
def browser():
    with Browser() as made:
        yield made


def serious_faults(browser):
    browser.run(AXE.read_text(encoding="utf-8"))
    browser.do.set_script_timeout(60)
    return browser.do.execute_async_script(SCAN)


def promote(browser, version, key):
    browser.click(f"button[aria-label='Promote {version}']")
    browser.wait(lambda: browser.text("#confirm-title"))
    browser.run("document.querySelector('#admin-key').value = ''")
    browser.write("#admin-key", key)
    browser.click("#confirm-do")


def publish_copy(state):
    """The draft in service once more, as if imported; returns its id."""
    registry = Registry(state)
    first = registry.in_service("default")
    weights = registry.load(first)
    copy = dataclasses.replace(first, id=new_version_id(1), parent=first.id)
    return registry.publish(lambda path: save_draft(weights, path), copy, status="imported").id


def in_service(browser):
    return browser.run("return document.querySelector('#versions .in_service')?.closest('tr').cells[0].innerText")


def test_an_empty_server_says_what_to_do_and_works_without_learning(model_folder, browser):
    with serve(model_folder, "--no-learn") as running:
        assert f"dashboard  {running.url}/\n" in running.banner
        browser.do.get(f"{running.url}/")
        browser.wait(lambda: "Nothing has been served yet" in browser.text("#empty"))
        browser.wait(lambda: f"livedraft chat --url {running.url}" in browser.text("#empty"))
        assert "Learning is off" in browser.text("#empty")
        assert browser.text("#learning") == "off"
        assert "no state folder" in browser.text("#versions-note")
        ask(running.url, 2)
        browser.wait(lambda: not browser.text("#empty"))
        assert browser.wait(lambda: is_a_count(browser.text("#speed")))
        assert browser.complaints() == []


def test_the_curve_moves_a_promotion_appears_and_the_key_decides_who_may(server, browser):
    browser.do.get(f"{server.url}/")
    browser.wait(lambda: browser.text("#phase") == "ready")
    ask(server.url, 8)
    first = browser.wait(lambda: browser.text("#acceptance-card") and browser.run(CURVE))
    drawn = browser.run(PIXELS)
    ask(server.url, 16, first=8)
    browser.wait(lambda: browser.run(CURVE) != first)
    browser.wait(lambda: browser.run(PIXELS) != drawn)
    assert "Running" in browser.text("#requests")
    bars, whole = browser.run(BARS)
    assert len(bars) == 3
    assert all(bar < 0.999 * whole for bar in bars)  # nothing is accepted always
    assert "3 tokens a round: fixed by num_speculative_tokens." in browser.text("#positions")
    assert browser.text("#ttft td").endswith(("ms", "s"))

    # The trainer, of idle priority, may take minutes on a busy machine; a second version is made here.
    version = publish_copy(server.state)
    browser.wait(lambda: browser.texts(f"button[aria-label='Promote {version}']"))
    serving = in_service(browser)

    promote(browser, version, "wrong key")
    browser.wait(lambda: "admin key is missing or wrong" in browser.text("#confirm-error"))
    assert in_service(browser) == serving
    browser.click("#confirm-cancel")

    promote(browser, version, KEY)
    browser.wait(lambda: not browser.run("return document.querySelector('#confirm').open"))
    browser.wait(lambda: in_service(browser) == version)
    ask(server.url, 2)
    browser.wait(lambda: "promoted" in browser.text("#acceptance-legend"))
    browser.wait(lambda: f"put draft {version} into service" in browser.text("#events"))

    browser.click("#rollback")
    browser.wait(lambda: browser.text("#confirm-title") == "Roll back?")
    browser.click("#confirm-do")  # the page remembers the key while it is open
    browser.wait(lambda: not browser.run("return document.querySelector('#confirm').open"))
    browser.wait(lambda: "took draft" in browser.text("#events"))
    browser.wait(lambda: "rolled back" in browser.text("#acceptance-legend"))
    ours = ("401", "willReadFrequently")  # the browser's own words for the wrong key, and for PIXELS
    complaints = [line for line in browser.complaints() if not any(word in line for word in ours)]
    assert complaints == []


def test_routes_are_named_and_rolled_back_from_their_own_rows_and_the_gates_reason_is_shown(
    model_folder, tmp_path, browser
):
    # Nothing was in service when this server started, so it only shows what the folder says.
    with serve(model_folder, "--no-learn", "--state", tmp_path, "--admin-key", KEY) as running:
        registry = Registry(tmp_path)
        before, serving, elsewhere, rejected = (
            publish(tmp_path, one_layer_draft(), number, status, route=route)
            for number, (status, route) in enumerate(
                [("retired", "shop"), ("in_service", "shop"), ("in_service", "default"), ("candidate", "default")]
            )
        )
        registry.reject(rejected.id, {"alpha": 0.4, "parent_alpha": 0.5, "reason": "p = 0.9 > 0.05"})
        browser.do.get(f"{running.url}/")
        browser.wait(lambda: len([row for row in browser.texts("#versions tbody tr") if "rejected" in row]) == 1)
        rows = browser.texts("#versions tbody tr")
        assert [row.split()[:2] for row in rows] == [
            [rejected.id, "default"], [elsewhere.id, "default"], [serving.id, "shop"], [before.id, "shop"]
        ]  # fmt: skip
        assert browser.text("#versions-route") == "Route"
        assert "p = 0.9 > 0.05" in rows[0]
        assert not browser.text("#rollback")  # of which route?
        browser.click("button[aria-label='Roll back route shop']")
        assert browser.text("#confirm-title") == "Roll back route shop?"
        browser.write("#admin-key", KEY)
        browser.click("#confirm-do")
        browser.wait(lambda: registry.in_service("shop").id == before.id)
        assert registry.in_service("default").id == elsewhere.id
        browser.resize(360, 800)
        assert browser.run("return document.documentElement.scrollWidth") <= 360
        assert browser.complaints() == []


def test_a_chat_streams_in_its_colours_and_what_a_model_says_is_text(server, browser):
    browser.do.get(f"{server.url}/")
    browser.wait(lambda: browser.text("#model") == "m")
    browser.write("#message", "hello there")
    browser.click("#send")
    browser.wait(lambda: "tokens in" in browser.text("#chat-status"), 60)
    kinds = browser.run("return [...new Set([...document.querySelectorAll('#chat .token')].map((e) => e.className))]")
    assert set(kinds) <= {"token accepted", "token recovered", "token bonus", "token plain", "token held"}
    assert len(kinds) >= 2
    browser.click("#speculates")
    browser.click("#new-chat")
    browser.write("#message", EVIL)
    browser.click("#send")
    browser.wait(lambda: "tokens in" in browser.text("#chat-status"), 60)
    plain = browser.run("return [...new Set([...document.querySelectorAll('#chat .token')].map((e) => e.className))]")
    assert set(plain) - {"token held"} == {"token plain"}  # held: what was left of half a character at the end
    assert browser.text("#chat .user") == EVIL
    assert "owned" not in browser.do.title
    assert browser.complaints() == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_it_is_readable_in_both_themes_on_a_desk_and_on_a_phone(server, browser, theme, width):
    browser.resize(width, 800)
    browser.show_theme(theme)
    browser.do.get(f"{server.url}/")
    ask(server.url, 2)
    browser.wait(lambda: browser.text("#acceptance-legend"))
    assert browser.run("return document.documentElement.scrollWidth") <= width
    light, dark = "rgb(247, 247, 245)", "rgb(18, 20, 23)"
    background = "return getComputedStyle(document.body).backgroundColor"
    assert browser.run(background) == (light if theme == "light" else dark)
    other = "dark" if theme == "light" else "light"
    while browser.text("#theme") != f"Theme: {other}":
        browser.click("#theme")
    assert browser.run(background) == (dark if theme == "light" else light)
    browser.do.refresh()
    assert browser.run(background) == (dark if theme == "light" else light)
    assert browser.complaints() == []


@pytest.mark.skipif(
    not AXE.exists(), reason=f"axe-core is not at {AXE} (`make axe` fetches it); the dashboard was NOT scanned."
)
@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 1280), ("light", 360)])
def test_a_scan_finds_no_serious_fault(server, model_folder, browser, theme, width):
    browser.resize(width, 800)
    browser.show_theme(theme)
    browser.do.get(f"{server.url}/")
    ask(server.url, 2)
    browser.wait(lambda: browser.text("#acceptance-legend"))
    browser.write("#message", "hello")
    browser.click("#send")
    browser.wait(lambda: "tokens in" in browser.text("#chat-status"), 60)
    assert serious_faults(browser) == []
    browser.click("#rollback")
    browser.wait(lambda: browser.run("return document.querySelector('#confirm').open"))
    assert serious_faults(browser) == []
    with serve(model_folder, "--no-learn") as empty:
        browser.do.get(f"{empty.url}/")
        browser.wait(lambda: browser.text("#empty"))
        assert serious_faults(browser) == []


def test_it_can_be_used_with_the_keyboard_alone(server, browser):
    from selenium.webdriver.common.keys import Keys

    browser.do.get(f"{server.url}/")
    browser.wait(lambda: browser.text("#rollback"))
    active = lambda: browser.do.switch_to.active_element  # noqa: E731
    active().send_keys(Keys.TAB)
    assert active().text == "Skip to the chat"
    reached = set()
    for _ in range(60):
        active().send_keys(Keys.TAB)
        reached.add(active().get_attribute("id") or active().get_attribute("aria-label") or active().text)
    assert {"theme", "rollback", "message", "send", "speculates", "chat"} <= reached
    browser.run("document.querySelector('#rollback').focus()")
    active().send_keys(Keys.ENTER)
    browser.wait(lambda: browser.run("return document.querySelector('#confirm').open"))
    assert active().get_attribute("id") == "admin-key"
    active().send_keys(Keys.ESCAPE)
    assert not browser.run("return document.querySelector('#confirm').open")
    assert active().get_attribute("id") == "rollback"


def test_the_past_is_there_after_a_restart_and_a_lost_server_is_noticed(model_folder, tmp_path, browser):
    state = ("--state", tmp_path / "state", "--no-learn")
    with serve(model_folder, *state) as running:
        browser.do.get(f"{running.url}/")
        browser.wait(lambda: browser.text("#phase") == "ready")
        ask(running.url, 3)
        browser.wait(lambda: is_a_count(browser.text("#speed")))
        assert running.stop() == 0
        browser.wait(lambda: "not connected" in browser.text("#phase"))
    browser.do.get("about:blank")
    browser.complaints()  # the browser may have said itself that nobody is there
    with serve(model_folder, *state) as running:
        browser.do.get(f"{running.url}/")
        browser.wait(lambda: is_a_count(browser.text("#speed")))
        assert not browser.text("#empty")
        assert browser.complaints() == []
