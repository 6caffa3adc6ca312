"""The pages of trajectories in a real browser: what is seen, keys, links, and hostile text."""

import functools
import http.server
import random
import re
import shutil

import pytest
from playwright.sync_api import expect
from serving import running
from telemetry_cases import call, record, segment_of, write_run, write_shard

from seeupo_jax.reports.trajectory_pages import write_pages


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three iterations of 8 x 4, and an evaluation of as many, with its pages."""
    workdir = tmp_path_factory.mktemp("desk")
    write_run(workdir)
    write_pages(workdir)
    return workdir


def go(page, workdir, fragment=""):
    """Opens the pages, as one does that follows a link."""
    page.goto("about:blank")
    page.goto((workdir / "trajectories" / "index.html").resolve().as_uri() + fragment)
    page.wait_for_selector("body[data-ready]", state="attached")
    return page


def write_one(workdir, **given):
    write_shard(workdir, [record(**given)])
    write_pages(workdir)
    return workdir


def speaking(content, role="assistant"):
    return [{"role": "user", "content": "Go."}, {"role": role, "content": content}]


def test_the_list_opens_a_conversation_with_its_roles(run, page, screenshot):
    go(page, run)
    expect(page.locator("#count")).to_contain_text("128 of 128")
    page.locator(".row").nth(2).click()
    expect(page).to_have_url(re.compile(r"#train/0/0/2$"))
    roles = page.locator("#view .message h3")
    expect(roles.first).to_have_text("system")
    expect(roles.nth(2)).to_contain_text("assistant · turn 1 · advantage × M")
    expect(page.locator("#view h2")).to_contain_text("train/cancel/0000")
    screenshot(page, "trajectories_conversation")


def test_only_rows_in_sight_are_drawn_and_scrolling_draws_the_others(run, page):
    go(page, run)
    assert page.locator(".row").count() < 30
    page.locator("#list").evaluate("list => { list.scrollTop = list.scrollHeight; }")
    expect(page.locator("#row-127")).to_be_visible()
    assert page.locator(".row").count() < 30


@pytest.mark.parametrize(
    ("content", "line", "coloured"),
    [
        (call("get_order", order_id="mug-3"), 'get_order(order_id="mug-3")', "x-key"),
        ('{"name": "get_order", "arguments": {"n": 3}}', "get_order(n=3)", "x-number"),
        ('[get_order(order_id="mug-3", deep=None)]', "[get_order(", "x-word"),
        (
            "See:\n```python\nfor x in y:\n    print('a')  # why\n```\nDone.",
            "for x in y",
            "x-comment",
        ),
    ],
    ids=["hermes", "json", "python", "code"],
)
def test_a_call_is_folded_and_coloured_in_every_form(tmp_path, page, content, line, coloured):
    go(page, write_one(tmp_path, messages=speaking(content)), "#train/0/0/0")
    details = page.locator("#view details.call")
    expect(details.locator("summary")).to_contain_text(line)
    expect(details.locator("pre")).to_have_count(0)
    details.locator("summary").click()
    expect(details.locator(f".{coloured}").first).to_be_visible()


RESULT = '{"paid": true, "number": 12345678901234567890, "a": 1, "a": 2, "of": "some one"}'
INDENTED = """{
  "paid": true,
  "number": 12345678901234567890,
  "a": 1,
  "a": 2,
  "of": "some one"
}"""


@pytest.mark.parametrize(
    ("role", "content", "unfolded"),
    [
        ("tool", RESULT, INDENTED),
        ("user", '<tool_response>\n{"paid": true}\n</tool_response>', '{"paid": true}'),
        ("user", "Output:\n```\npaid: True\n```", "paid: True"),
    ],
    ids=["tool", "tool_response", "output"],
)
def test_a_result_is_folded_and_unfolds_to_what_was_written(
    tmp_path, page, role, content, unfolded
):
    go(page, write_one(tmp_path, messages=speaking(content, role)), "#train/0/0/0")
    result = page.locator("#view .columns details.result pre")
    expect(result).to_have_count(0)
    page.keyboard.press("o")
    expect(result).not_to_be_empty()
    assert result.text_content() == unfolded
    expect(page).to_have_url(re.compile("folds=all"))


def test_thinking_is_folded_and_prose_stays(tmp_path, page):
    content = "<think>hm</think>I look.\n" + call("get_order")
    go(page, write_one(tmp_path, messages=speaking(content)), "#train/0/0/0")
    message = page.locator("#view .message.assistant")
    expect(message.locator("details.think")).to_have_count(1)
    expect(message.locator("details.call")).to_have_count(1)
    expect(message.locator("div.block")).to_have_text("I look.")


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("split=eval+test", 32),
        ("iteration=1", 32),
        ("group=3", 16),
        ("stop=max_turns&split=train", 21),
        ("label.kind=cancel", 48),
        ("q=RETURN", 48),
        ("q=train/cancel/0000", 12),
        ("turns=2&iteration=0", 8),
        ("q=nothing+like+it", 0),
    ],
)
def test_filters_are_in_the_address(run, page, query, count):
    go(page, run, f"#?{query}")
    expect(page.locator("#count")).to_contain_text(re.compile(rf"^{count} of 128"))


def test_outcomes_divide_the_run(run, page):
    counts = []
    for outcome in ("success", "no+success", "failed"):
        go(page, run, f"#?outcome={outcome}")
        counts.append(int(page.locator("#count").inner_text().split()[0]))
    assert sum(counts) == 128 and min(counts) > 10


def test_an_episode_that_nothing_judged_is_neither_success_nor_failure(tmp_path, page):
    go(page, write_one(tmp_path, success=None, failed=False, stop="max_turns"))
    expect(page.locator(".row").get_by_role("img", name="not judged")).to_have_count(1)
    expect(page.locator("#count")).to_have_text("1 of 1")


def test_choosing_a_filter_changes_list_and_address(run, page):
    go(page, run)
    page.locator("#more summary").click()
    page.get_by_label("Stop reason").select_option("env_error")
    expect(page.locator("#active")).to_have_text("(1 set)")
    expect(page).to_have_url(re.compile("stop=env_error"))
    page.locator("#q").fill("cancel")
    expect(page).to_have_url(re.compile("q=cancel"))
    expect(page.locator(".row .task").first).to_contain_text("cancel")
    page.reload()
    expect(page.locator("#q")).to_have_value("cancel")
    expect(page.get_by_label("Stop reason")).to_have_value("env_error")
    page.locator("#clear").click()
    expect(page.locator("#count")).to_contain_text("128 of 128")


@pytest.mark.parametrize(
    ("order", "key"), [("newest", "iteration"), ("reward", "reward"), ("weight", "weight")]
)
def test_orders_sort_the_list(run, page, order, key):
    go(page, run, f"#?order={order}")
    values = page.evaluate(f"listed.map(row => at('{key}', row) ?? -1)")
    assert values == sorted(values, reverse=True) and len(set(values)) > 1


def test_a_link_opens_the_same_view_in_a_copied_workdir(run, page, tmp_path):
    copy = tmp_path / "elsewhere" / "copy of a run"
    shutil.copytree(run, copy)
    go(page, copy, "#train/1/2/1?tint=entropy&beside=0,2&label.kind=status")
    expect(page.locator("#view h2")).to_contain_text("train/status/0002")
    expect(page.get_by_label("by entropy")).to_be_checked()
    expect(page.locator(".column")).to_have_count(3)
    expect(page.locator("#count")).to_contain_text("32 of 128")


def test_a_link_brings_its_row_into_sight(run, page):
    go(page, run, "#train/2/7/0")
    chosen = page.locator(".row[aria-selected=true]")
    expect(chosen).to_be_in_viewport()
    expect(chosen).to_contain_text("train/2/7/0")


def test_small_numbers_keep_their_size(tmp_path, page):
    made = sampled([-1.0], [-1.000003], [0.0])
    go(page, write_one(tmp_path, **made), "#train/0/0/0?tint=gap")
    expect(page.locator(".badge")).to_contain_text("mean |gap| 3.0e−6")


def test_going_back_returns_to_what_was_seen(run, page):
    go(page, run, "#train/0/0/0")
    page.locator(".siblings a").nth(2).click()
    expect(page.locator("#view .where")).to_contain_text("member 2")
    page.go_back()
    expect(page.locator("#view .where")).to_contain_text("member 0")


@pytest.mark.parametrize("tint", ["plain", "turn", "weight", "gap", "entropy"])
def test_tokens_are_tinted_and_say_so_without_colour(run, page, screenshot, tint):
    go(page, run, f"#train/1/1/2?tint={tint}")
    expect(page.locator(".legend")).to_be_visible()
    expect(page.locator("dl.facts")).to_contain_text(
        re.compile(r"by name, unweighted\s*env .*, brev")
    )
    expect(page.locator(".turn .badge").first).to_contain_text(re.compile("turn 1 · .* tokens"))
    shapes = page.locator(".turn .token").evaluate_all(
        "all => all.map(t => { const s = getComputedStyle(t);"
        " return [s.textDecorationLine, s.textDecorationStyle, s.textDecorationThickness].join();"
        " })"
    )
    kinds = set(shapes)
    least = {"plain": 1, "turn": 3, "weight": 2, "gap": 6, "entropy": 4}[tint]
    assert len(kinds) >= least, kinds
    assert tint == "plain" or all(shape.startswith("underline") for shape in kinds)
    text = page.locator(".tokens").first.inner_text()
    assert text.replace("↵", "").startswith("I need the facts of mug-1 first.")
    screenshot(page, f"trajectories_tint_{tint}")


def sampled(sampler, trainer, entropy):
    """Messages, and their segment with these numbers at the tokens of the one answer."""
    messages = speaking("abcd" * len(sampler))
    segment = segment_of(messages, random.Random(0))
    context = [None] * segment["turn"].index(0)
    numbers = {"logp": sampler, "trainer_logp": trainer, "entropy": entropy}
    segment |= {key: context + values for key, values in numbers.items()}
    return {"messages": messages, "segments": [segment], "turns": 1}


@pytest.mark.parametrize(
    ("tint", "classes", "scale"),
    [
        # The scale is the 95th percentile downwards: of 0, 0.2, 0.4 and 4 nats, 0.4.
        ("gap", ["l4 positive", "l2 negative", "l0 positive", "l4 negative"], "0.30 largest 4.00"),
        (
            "entropy",
            ["l2 positive", "l4 positive", "l4 positive", "l0 positive"],
            "0.75 largest 2.00",
        ),
        ("weight", ["l4 negative"] * 4, "0.56 largest 0.75"),
    ],
)
def test_tints_are_of_the_record_and_their_scale_is_printed(tmp_path, page, tint, classes, scale):
    made = sampled([-1.0, -1.0, -1.0, -5.0], [-1.4, -0.8, -1.0, -1.0], [0.5, 1.0, 2.0, 0.0])
    go(page, write_one(tmp_path, **made, weights=[-0.75]), f"#train/0/0/0?tint={tint}")
    got = page.locator(".turn .token").evaluate_all("all => all.map(t => t.className)")
    assert got == [f"token {name}" for name in classes]
    beyond, _, largest = scale.split()
    expect(page.locator(".legend")).to_contain_text(f"largest here {largest}")
    expect(page.locator(".legend .l4").last).to_contain_text(beyond)
    expect(page.locator(".badge")).to_contain_text("advantage × M −0.750")


@pytest.mark.parametrize("tint", ["weight", "gap", "entropy"])
def test_numbers_nobody_computed_are_said_to_be_missing(tmp_path, page, tint):
    empty = [None] * 2
    made = sampled(empty, empty, empty)
    go(page, write_one(tmp_path, **made, weights=[None]), f"#train/0/0/0?tint={tint}")
    expect(page.locator(".legend")).to_contain_text("hold no such numbers")
    expect(page.locator(".turn .token.none").first).to_be_visible()


@pytest.fixture
def numbers(tmp_path):
    """A group of three and a task without an id, with no number twice where one could be taken for
    another."""
    absent = [None, None]
    answers = [
        sampled([-1.5, -2.5, -3.5, -4.5], [-1.25, -2.4, *absent], [0.5, 0.25, *absent]),
        sampled([-0.5] * 4, [-0.5] * 4, [2.0] * 4),
    ]
    answers[0]["messages"].insert(1, {"role": "assistant", "content": "sent", "history": "sent"})
    judged = {"task_id": "desk", "failed": False, "failure": None, "stop": "done"}
    first = {"reward": 0.75, "advantage": -1.25, "weights": [-0.6], "turn_rewards": [0.35]}
    second = {"reward": 0.5, "advantage": 2.5, "weights": [1.8], "success": False}
    failed = {"task_id": "desk", "failed": True, "failure": "TimeoutError", "stop": "env_error"}
    unknown = {"task_id": "", "failed": False, "failure": None, "stop": "max_turns", "reward": 0.1}
    records = [
        record(**answers[0] | judged | first | {"success": True, "policy_version": 17}),
        record(member=1, **answers[1] | judged | second | {"turns": 3}),
        record(member=2, **failed, success=None, reward=None, turns=2),
        record(group=1, **unknown, success=None, turns=4),
    ]
    records[0]["seed"] = 11
    write_shard(tmp_path, records)
    write_pages(tmp_path)
    return tmp_path


def test_every_number_stands_where_its_name_says(numbers, page):
    go(page, numbers, "#train/0/0/0?tint=entropy&beside=1")
    expect(page.locator("#count")).to_have_text("4 of 4 · 50% of 2 judged succeed")
    facts = page.locator(".row .facts")
    expect(facts.first).to_have_text("train/0/0/0 · done · 1 turns · reward 0.75 · |A·M| 0.60")
    for name, options in (
        ("stop", ["done (2)", "env_error (1)", "max_turns (1)"]),
        ("failure", ["TimeoutError (1)"]),
    ):
        texts = page.locator(f"select[name={name}] option").all_text_contents()
        assert texts == ["all", *options]
    values = page.locator("dl.facts > *").all_text_contents()
    pairs = dict(zip(values[::2], values[1::2], strict=True))
    assert pairs.items() >= {
        ("seed", "11"),
        ("policy version", "17"),
        ("rewards by turn", "0.35"),
    }
    cells = page.locator(".siblings tbody tr").first.locator("td").all_text_contents()
    assert cells == ["", "0", "✓", "0.75", "done", "1", "−1.25", "0.60"]
    heads = page.locator(".column > h3").all_text_contents()
    assert heads == ["✓ member 0 · reward 0.75 · done", "✗ member 1 · reward 0.50 · done"]
    # Of both members 2 nats is the strongest tint; of the first alone 0.25 would be.
    tokens = page.locator(".turn .token")
    classes = tokens.evaluate_all("all => all.map(t => t.className.replace('token ', ''))")
    assert classes == ["l1 positive"] * 2 + ["none"] * 2 + ["l4 positive"] * 4
    expect(page.locator(".legend .none")).to_have_text("not computed: 2")
    expect(page.locator(".badge").first).to_have_text(
        "turn 1 · 4 tokens · advantage × M −0.600 · mean entropy 0.3750 · mean |gap| 0.1750"
    )
    tokens.first.focus()
    expect(page.locator("#info")).to_contain_text(
        "turn 1 · advantage × M −0.6000 · log-probability −1.5000 · trainer −1.2500"
        " · gap −0.25000 · entropy 0.5000 nats"
    )
    page.evaluate("location.hash = '#train/0/0/0'")  # the conversation
    roles = page.locator("#view .message h3")
    expect(roles).to_have_text(["user", "assistant", "assistant · turn 1 · advantage × M −0.600"])
    for order, listed in (
        ("turns", ["1/0", "0/1", "0/2", "0/0"]),
        ("-reward", ["1/0", "0/1", "0/0", "0/2"]),
    ):
        page.evaluate(f"location.hash = '#?order={order}'")
        expect(facts).to_contain_text([f"train/0/{path} " for path in listed])


def test_a_character_in_parts_and_line_ends_are_marked(tmp_path, page):
    made = sampled([-1.0] * 3, [-1.0] * 3, [0.0] * 3)
    made["segments"][0]["text"][-3:] = ["", "é\n", "\n"]
    go(page, write_one(tmp_path, **made), "#train/0/0/0?tint=turn")
    tokens = page.locator(".turn .token")
    expect(tokens.nth(0).locator(".part")).to_have_count(1)
    expect(tokens.nth(1).locator(".end")).to_have_count(1)
    assert tokens.nth(1).evaluate("t => t.textContent") == "é\n"


def test_a_token_tells_its_numbers_on_focus_and_under_the_mouse(run, page):
    go(page, run, "#train/1/1/2?tint=entropy")
    tokens = page.locator(".turn .token")
    tokens.nth(0).focus()
    expect(page.locator("#info")).to_contain_text(
        re.compile(r'"I ne" · turn 1 · .*entropy .* nats')
    )
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(page.locator("#info")).to_contain_text('"ed t"')
    tokens.nth(3).hover()
    expect(page.locator("#info")).to_contain_text("cts ")


def test_the_group_is_listed_and_stands_side_by_side(run, page, screenshot):
    go(page, run, "#train/1/2/1")
    lines = page.locator(".siblings tbody tr")
    expect(lines).to_have_count(4)
    assert "env_error" in lines.nth(3).inner_text()
    page.get_by_label("show member 2 side by side").check()
    expect(page).to_have_url(re.compile("beside=2"))
    expect(page.locator(".column")).to_have_count(2)
    page.keyboard.press("s")
    expect(page.locator(".column")).to_have_count(4)
    heads = page.locator(".column > h3").all_inner_texts()
    assert [re.search(r"member (\d)", head)[1] for head in heads] == ["0", "1", "2", "3"]
    left = [box["x"] for box in map(lambda c: c.bounding_box(), page.locator(".column").all())]
    assert left == sorted(set(left)), "columns stand beside each other"
    screenshot(page, "trajectories_group")


def test_every_key_does_what_the_help_says(run, page):
    go(page, run)
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("#train/0/0/1$"))
    expect(page.locator("#view")).to_be_focused()
    expect(page.locator("#view .where")).to_contain_text("member 1")
    for key, address in (("j", "0/0/2"), ("k", "0/0/1"), ("]", "0/0/2"), ("[", "0/0/1")):
        page.keyboard.press(key)
        expect(page).to_have_url(re.compile(f"#train/{address}$"))
        expect(page.locator("#view .where")).to_contain_text(f"member {address[-1]}")
    page.keyboard.press("t")
    expect(page).to_have_url(re.compile("tint=plain"))
    page.keyboard.press("T")
    expect(page).not_to_have_url(re.compile("tint"))
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#help")).to_be_hidden()
    page.keyboard.press("Escape")
    expect(page.locator("#list")).to_be_focused()
    page.keyboard.press("End")
    expect(page.locator("#row-127")).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("jk")
    expect(page.locator("#q")).to_have_value("jk")


def test_the_focus_stays_where_it_was_when_the_view_changes(run, page):
    go(page, run, "#train/1/1/2")
    page.get_by_label("Conversation").focus()
    page.keyboard.press("ArrowRight")
    expect(page).to_have_url(re.compile("tint=plain"))
    expect(page.get_by_label("Tokens", exact=True)).to_be_focused()
    page.locator(".turn .token").nth(2).focus()
    page.keyboard.press("t")
    expect(page.locator(".turn .token.h0").nth(2)).to_be_focused()
    expect(page.locator("#info")).to_contain_text('"he f"')
    page.locator(".siblings a").first.click()
    expect(page.locator("#view")).to_be_focused()


def test_skip_links_and_names_are_there_for_those_who_do_not_see(run, page):
    go(page, run)
    page.keyboard.press("Tab")
    expect(page.locator(".skip").first).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("listbox", name="Trajectories")).to_be_focused()
    chosen = page.locator("#list").get_attribute("aria-activedescendant")
    expect(page.locator(f"#{chosen}")).to_have_attribute("role", "option")
    outline = page.locator("#list").evaluate("l => getComputedStyle(l).outlineStyle")
    assert outline == "solid"
    assert page.get_by_role("img", name="no success").count() > 0


HOSTILE = (
    "<img src=x onerror=alert(1)><script>alert(2)</script></script><!-- <svg onload=alert(3)>"
    "\u202eright to left\u202c\x00\x1b[31m\ufeff\u2028\u2029\ud800 '\"`${alert(4)}"
)


def test_hostile_text_is_text_everywhere(tmp_path, page, screenshot):
    messages = [
        {"role": HOSTILE, "content": HOSTILE},
        {"role": "assistant", "content": f"<think>{HOSTILE}</think>{call(HOSTILE, a=HOSTILE)}"},
        {"role": "tool", "content": HOSTILE},
        {"role": "user", "content": f"```{HOSTILE.replace('`', '')}\n{HOSTILE}\n```"},
        {"role": "assistant", "content": f"```python\n{HOSTILE}\n```"},
    ]
    given = {"task_id": HOSTILE, "stop": HOSTILE, "failure": HOSTILE, "success": None}
    made = record(messages=messages, labels={HOSTILE: HOSTILE}, info={HOSTILE: HOSTILE}, **given)
    for place in (3, -1):  # of tokens' texts: a token that is no number is refused
        made["segments"][0]["text"][place] = HOSTILE
    (tmp_path / "run.json").write_text('{"name": "<img src=x onerror=alert(5)>"}')
    write_shard(tmp_path, [made])
    write_pages(tmp_path)
    go(page, tmp_path, "#train/0/0/0?folds=all")
    expect(page.locator("#view .columns details[open] > pre")).to_have_count(5)
    seen = page.locator("#view").text_content()
    assert seen.count("<img src=x onerror=alert(1)>") >= 20
    assert "U+202E" in seen and "U+0000" in seen and "U+D800" in seen and "\u202e" not in seen
    screenshot(page, "trajectories_hostile")
    go(page, tmp_path, "#train/0/0/0?tint=turn")
    page.locator(".turn .token").last.focus()
    expect(page.locator("#info")).to_contain_text("<img src=x")
    page.locator("#more summary").click()
    for tag in ("img", "svg", "iframe", "script:not([src])"):
        assert page.locator(tag).count() == 0
    # The failure, if any, is an alert, a request or an error, which fail the test at its end.


@pytest.mark.parametrize(
    ("attempt", "refused"),
    [
        ("document.body.innerHTML = '<b>x</b>'", "TrustedHTML"),
        ("document.createElement('script').text = 'alert(1)'", "TrustedScript"),
        ("document.createElement('script').src = 'https://example.org/x.js'", "TrustedScriptURL"),
        ("await fetch('https://example.org/')", "Failed to fetch"),
    ],
)
def test_the_page_refuses_markup_scripts_and_addresses_of_others(run, page, attempt, refused):
    go(page, run)
    reported = page.evaluate(
        f"async () => {{ try {{ {attempt}; return 'done'; }}"
        " catch (error) { return error.message; } }"
    )
    assert refused in reported
    assert not [text for text in page.wrong if "asked the network" in text]
    page.wrong.clear()


def test_a_long_message_opens_cut_and_is_shown_when_asked(tmp_path, page):
    content = "0123456789" * 100_000
    go(page, write_one(tmp_path, messages=speaking(content, "user")), "#train/0/0/0")
    message = page.locator("#view .message").nth(1)
    assert len(message.inner_text()) < 25_000
    message.get_by_role("button", name="Show all 1,000,000 characters").click()
    expect(message.get_by_role("button")).to_have_count(0)
    assert len(message.locator(".block").text_content()) == 1_000_000


def test_unclosed_and_nested_blocks_do_not_hang_the_page(tmp_path, page):
    content = "<tool_call>" * 20_000 + "```\n" * 20_000 + '{"a":' * 20_000 + "[[" * 20_000
    messages = speaking(content) + speaking(content, "tool") + speaking(content, "user")
    workdir = write_one(tmp_path, messages=messages, segments=[])
    go(page, workdir, "#train/0/0/0?folds=all")
    expect(page.locator("#view .message")).to_have_count(6, timeout=20_000)


def test_of_ten_thousand_trajectories_only_those_in_sight_are_drawn(tmp_path, page, screenshot):
    short = speaking("I look.")  # the list has no part of what was said
    some = [record(group=g, member=m, messages=short) for g in range(10) for m in range(4)]
    for iteration in range(25):
        made = [
            some[(4 * g + m) % 40] | {"iteration": iteration, "group": g, "member": m}
            for g in range(100)
            for m in range(4)
        ]
        write_shard(tmp_path, made)
    write_pages(tmp_path)
    page.goto((tmp_path / "trajectories" / "index.html").as_uri())
    page.locator(".row").first.wait_for()
    expect(page.locator("#count")).to_contain_text("10,000 of 10,000")
    assert page.locator(".row").count() < 300  # what is not in sight is not drawn
    page.locator(".row").nth(3).click()
    page.locator("#view .message").first.wait_for()
    page.locator("#q").fill("cancel")
    expect(page.locator("#count")).to_contain_text(re.compile("^4,000 of 10,000"))
    screenshot(page, "trajectories_ten_thousand")


def test_a_phone_shows_list_or_trajectory(run, new_page, screenshot):
    page = go(new_page(width=390, height=844, has_touch=True, is_mobile=True), run)
    expect(page.locator("#view")).to_be_hidden()
    screenshot(page, "trajectories_phone_list")
    page.locator(".row").nth(1).tap()
    expect(page.locator("#browse")).to_be_hidden()
    expect(page.locator("#view h2")).to_be_visible()
    for fragment in ("", "?tint=gap", "?folds=all", "?beside=all"):
        go(page, run, f"#train/1/1/2{fragment}")
        expect(page.locator(".column").first).to_be_visible()
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 390, f"{fragment or 'plain'} is {wide} px wide"
    screenshot(page, "trajectories_phone_group")
    go(page, run, "#train/1/1/2?tint=gap")
    screenshot(page, "trajectories_phone_tint")
    page.locator(".back").tap()
    expect(page.locator("#list")).to_be_visible()


def contrast(page, selector):
    """WCAG's ratio of an element's text to what is behind it, with tints laid over each other."""
    colours = page.locator(selector).first.evaluate(
        "e => { const all = [getComputedStyle(e).color];"
        " for (; e; e = e.parentElement) all.push(getComputedStyle(e).backgroundColor);"
        " return all; }"
    )
    text, *layers = [[float(n) for n in re.findall(r"[\d.]+", colour)] for colour in colours]
    behind = [255.0] * 3
    for *layer, alpha in [[*rgb, 1.0][:4] for rgb in reversed(layers)]:
        behind = [alpha * new + (1 - alpha) * old for new, old in zip(layer, behind, strict=True)]
    dark, light = sorted(map(luminance, (text[:3], behind)))
    return (light + 0.05) / (dark + 0.05)


def luminance(rgb):
    parts = [
        v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in (c / 255 for c in rgb)
    ]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_light_and_dark(run, new_page, screenshot, scheme):
    page = go(new_page(color_scheme=scheme), run, "#train/1/1/2?folds=all")
    texts = [".facts", "#count", "#view .message.assistant", "#view .message.tool .x-key", ".where"]
    texts += [".x-string", ".x-number", ".x-name", ".preview", ".mark.success", ".mark.no-success"]
    ratios = {text: contrast(page, text) for text in texts if page.locator(text).count()}
    screenshot(page, f"trajectories_{scheme}")
    go(page, run, "#train/1/1/2?tint=gap")
    levels = (".l1", ".l2", ".l3", ".l4", ".l4.negative", ".badge", ".context")
    ratios |= {text: contrast(page, f"#view {text}") for text in levels}
    screenshot(page, f"trajectories_{scheme}_gap")
    go(page, run, "#train/1/1/2?tint=turn")
    ratios |= {text: contrast(page, f"#view .turn .token{text}") for text in (".h0", ".h1", ".h2")}
    assert {text: ratio for text, ratio in ratios.items() if ratio < 4.5} == {}


def test_the_report_is_linked_where_there_is_one(run, page, tmp_path):
    go(page, run)
    expect(page.get_by_role("link", name="Report")).to_have_attribute("href", "../report.html")
    write_pages(tmp_path, report=None)
    go(page, tmp_path)
    expect(page.locator("#report")).to_be_hidden()
    expect(page.locator("#count")).to_have_text("This run has written no trajectories yet.")


def test_what_is_not_there_is_said(run, page, tmp_path):
    go(page, run, "#train/99/0/0")
    expect(page.get_by_role("alert")).to_contain_text("There is no trajectory train/99/0/0 here.")
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    for chunk in (copy / "trajectories" / "data").glob("train_000001-*-00.js"):
        chunk.unlink()
    go(page, copy, "#train/1/0/0")
    expect(page.get_by_role("alert")).to_contain_text("reload the page")
    assert all("ERR_FILE_NOT_FOUND" in text for text in page.wrong)
    page.wrong.clear()
    page.locator("#list").focus()
    page.keyboard.press("Home")
    expect(page.locator("#view .message").first).to_be_visible()


def test_a_static_server_serves_it_too(run, page):
    handler = functools.partial(QuietHandler, directory=str(run))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, running(server):
        page.goto(f"http://127.0.0.1:{server.server_port}/trajectories/index.html#train/1/1/2")
        expect(page.locator("#view .message").first).to_be_visible()
        page.goto("about:blank")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Says nothing."""
