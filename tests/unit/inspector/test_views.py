from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from agentrl_cli.errors import UserInputError
from agentrl_cli.inspector.inspect_run import inspect_run
from agentrl_cli.inspector.list_view import (
    build_step_table,
    format_alarms,
    format_ranges,
    summarize_steps,
)
from agentrl_cli.inspector.trajectory_query import TrajectoryQuery
from agentrl_cli.inspector.trajectory_view import build_tree, find_new_messages, list_tokens
from agentrl_cli.prefix_mismatches import MismatchSummary
from agentrl_cli.records import (
    Boundary,
    Failure,
    Interaction,
    MismatchCause,
    StopReason,
    Trajectory,
)
from agentrl_cli.store.run_folder import RunFolder


def render(renderable) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(renderable)
    return console.file.getvalue()


@pytest.fixture
def show(folder: RunFolder):
    def do(trajectory: str | None = None, tokens: bool = False, **query) -> str:
        folder.flush()
        console = Console(file=io.StringIO(), width=200, color_system=None)
        inspect_run(
            folder.path, trajectory, TrajectoryQuery(**query), tokens=tokens, console=console
        )
        return console.file.getvalue()

    return do


@pytest.fixture
def show_json(folder: RunFolder, capsys):
    def do(trajectory: str | None = None, tokens: bool = False, **query):
        folder.flush()
        inspect_run(folder.path, trajectory, TrajectoryQuery(**query), tokens=tokens, as_json=True)
        text = capsys.readouterr().out
        return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    return do


def test_replaced_groups_are_shown(folder: RunFolder, show, show_json) -> None:
    assert "replaced groups" not in show()
    step = show_json()["steps"][-1]["step"]
    kept = Trajectory(id="g2/0", group_id="g2", task_id="7", step=step + 1, reward=1.0)
    replaced = dataclasses.replace(kept, id="g1/0", group_id="g1", replaced_by="g2")
    folder.write_trajectories(step + 1, [replaced, kept])
    assert "replaced groups" in show()
    assert [s["num_filtered_groups"] for s in show_json()["steps"]][-2:] == [0, 1]
    assert show(replaced="any").count("  replaced  ") == 1
    assert [t["id"] for t in show_json(replaced="any")["trajectories"]] == ["g1/0"]
    of_step = show_json(steps=str(step + 1), replaced="none")["trajectories"]
    assert [(t["id"], t["replaced_by"]) for t in of_step] == [("g2/0", None)]
    text = "not trained on: its group scored alike, and g2 replaced it"
    assert text in show("g1/0")
    assert text not in show("g2/0")
    assert show_json("g1/0")["replaced_by"] == "g2"


def test_a_tree_shows_each_message_once_and_its_branches(forked: Trajectory) -> None:
    text = render(build_tree(forked, "step 1"))
    assert text.count("user: What is 17 x 23?") == 1
    assert text.count('calls calculate({"expression": "17*23"})') == 1
    # The tool's result stands in both branches: each branch sent it.
    assert text.count("tool (call_1): 391") == 2
    assert "branch 1 of 2" in text
    assert "branch 2 of 2" in text
    # Its prompt holds the first turn's five tokens and one more: nothing is re-prefilled.
    assert (
        "prefix mismatch: retokenized: 0 prompt tokens re-prefilled, 0 sampled tokens dropped"
        in text
    )
    assert "version 3-4" in text
    assert "reward 0.500  return 0.500" in text
    assert "1 call that did not complete" in text
    assert "failed: the engine died" in text
    assert "reward: 1.000  exact 1.000" in text
    assert "final answer: 391" in text


def test_the_budget_that_stopped_it_is_named(forked: Trajectory) -> None:
    stopped = dataclasses.replace(forked, stop_reason=StopReason.MAX_TURNS)
    assert "stopped by its budget: max_turns" in render(build_tree(stopped, "step 1"))
    assert "stopped by" not in render(build_tree(forked, "step 1"))


def test_only_forks_are_indented() -> None:
    """A conversation of many turns must not run out of the terminal to the right."""
    calls, messages = [], ({"role": "user", "content": "go"},)
    for number in range(300):
        reply = {"role": "assistant", "content": f"turn {number}"}
        calls.append(
            Interaction(
                id=f"c{number}",
                parent_id=f"c{number - 1}" if number else None,
                messages=messages,
                reply=reply,
                started=2 * number,
            )
        )
        messages = (*messages, reply, {"role": "user", "content": f"next {number}"})
    text = render(
        build_tree(
            Trajectory(id="t", group_id="g", task_id="0", interactions=tuple(calls)), "step 1"
        )
    )
    columns = {line.index("turn ") for line in text.splitlines() if "assistant: turn" in line}
    assert len(columns) == 1
    assert text.count("next 298") == 1


def test_new_messages_where_the_history_was_edited(forked: Trajectory) -> None:
    first, second = forked.interactions[:2]
    assert [m["role"] for m in find_new_messages(second, first)] == ["tool"]
    edited = dataclasses.replace(second, messages=({"role": "user", "content": "other"},))
    assert find_new_messages(edited, first) == edited.messages


def test_partial_and_damaged_records_are_shown(forked: Trajectory) -> None:
    """A circle, an unknown parent, missing replies, strange contents: nothing raises."""
    strange = (
        Interaction(id="x", parent_id="y", started=1, messages=({"content": [{"type": "image"}]},)),
        Interaction(id="y", parent_id="x", started=1, reply={"tool_calls": [None, {"id": 1}]}),
        Interaction(id="z", parent_id="z", reply={"role": "assistant", "tool_calls": "text"}),
        Interaction(id="w", parent_id="gone", messages=("no dict",), reply={"content": 3}),  # type: ignore[arg-type]
    )
    text = render(build_tree(dataclasses.replace(forked, interactions=strange), "step 1"))
    for name in "xyzw":
        assert f"  {name}" in text
    assert render(build_tree(Trajectory(id="t", group_id="g", task_id="0"), "step 1"))


def test_texts_of_models_cannot_move_the_cursor_or_style_the_page(forked: Trajectory) -> None:
    evil = "\x1b[2J[bold red]x[/] \x07 ok"
    changed = dataclasses.replace(forked, final_answer=evil, task={"q": evil})
    text = render(build_tree(changed, "step 1"))
    assert "\x1b" not in text
    assert "\\x1b[2J[bold red]x[/] \\x07 ok" in text


def test_tokens_and_mask_come_from_the_call(forked: Trajectory) -> None:
    rows = list_tokens(forked.interactions[0])
    assert [r.token_id for r in rows] == [1, 2, 3, 4, 5]
    assert [r.trained for r in rows] == [False, False, False, True, True]
    assert [r.logprob for r in rows] == [None, None, None, -0.5, -0.25]
    assert [r.version for r in rows] == [None, None, None, 3, 4]
    greedy = dataclasses.replace(forked.interactions[0], temperature=0.0)
    assert not any(r.trained for r in list_tokens(greedy))
    torn = dataclasses.replace(forked.interactions[0], rollout_logprobs=(-0.5,), versions=())
    assert list_tokens(torn)[-1].logprob is None


def test_a_run_is_shown_as_its_steps(show) -> None:
    text = show()
    assert "step 1" in text
    assert "eval 0" in text
    assert "eval 2 manual" in text
    assert "--step 2" in text


def test_steps_have_columns_for_the_trouble_that_they_had(tmp_path, folder: RunFolder) -> None:
    def heads(summaries, width: int) -> str:
        console = Console(file=io.StringIO(), width=width, color_system=None)
        console.print(build_step_table(summaries))
        lines = console.file.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        return " ".join(" ".join(lines[:2]).split())

    troubled = summarize_steps(folder)
    assert "failed: surroundings" in heads(troubled, 200)
    assert "…" not in heads(troubled, 80)
    totals = dataclasses.replace(
        troubled[0].totals,
        num_unscored=0,
        num_policy_failures=0,
        num_surroundings_failures=0,
        num_filtered_groups=0,
        prefix_mismatches=MismatchSummary(),
    )
    quiet = dataclasses.replace(troubled[0], totals=totals, alarms=())
    assert heads([quiet], 80).startswith("trajectories reward turns tokens step")


def test_a_list_numbers_its_trajectories(show) -> None:
    text = show(steps="2", failure="any")
    assert "000002.000/1" in text
    assert "timeout" in text
    assert "NaN" in text
    assert "000002.000/0" not in text
    assert "2 of" not in text
    assert "1 of 4 are shown" in show(steps="2", limit=1)
    assert "no trajectory matches" in show(min_reward=7)


def test_a_list_at_80_columns_says_what_was_asked_expected_and_said(folder: RunFolder) -> None:
    calls = (Interaction(id="c", has_malformed_call=True, finish_reason="length"),)
    task = {"question": "How many eggs does Janet sell in a whole week?", "answer": "so\n#### 18"}
    cut = Trajectory(
        id="g/0",
        group_id="g",
        task_id="7",
        task=task,
        interactions=calls,
        reward=0.0,
        final_answer="17",
    )
    failure = Failure(boundary=Boundary.TOOL, kind="X", message="no such tool")
    failed = dataclasses.replace(cut, id="g/1", failure=failure, final_answer=None, reward=None)
    folder.write_trajectories(3, [cut, failed])

    def list_at_80(**query: str) -> list[str]:
        console = Console(file=io.StringIO(), width=80, color_system=None)
        folder.flush()
        inspect_run(folder.path, None, TrajectoryQuery(steps="3", **query), console=console)
        return console.file.getvalue().splitlines()

    head, first, *_ = lines = list_at_80()
    assert head.split() == ["#", "reward", "turns", "ended", "question", "expected", "said"]
    assert first.split()[:5] == ["1", "0.000", "1", "cut:", "reply"]
    assert "How many eggs" in first
    assert first.split()[-3:] == ["####", "18", "17"]
    assert any("malformed call" in line for line in lines)
    assert any("failed: tool" in line and "no such tool" in line for line in lines)
    assert max(map(len, lines[:6])) <= 80
    assert list_at_80(malformed="none") == ["no trajectory matches"]


def test_tokens_are_said_to_be_trained_only_where_they_are(
    folder: RunFolder, forked: Trajectory, show, show_json
) -> None:
    assert show("000001.000/0", tokens=True).count("trained") == 4
    reasons = {
        "its group was replaced by g9": {"replaced_by": "g9"},
        "it has no reward": {"reward": None},
        "its group scored alike": {"group_id": "alone"},
    }
    for number, changes in enumerate(reasons.values()):
        changed = dataclasses.replace(forked, id=f"x/{number}", **changes)
        folder.write_trajectories(4 + number, [changed])
        folder.append_metrics({"step": 4 + number})
    for number, reason in enumerate(reasons):
        assert f"none of these tokens is trained on: {reason}" in show(f"x/{number}", tokens=True)
        assert not any(show_json(f"x/{number}", tokens=True)["interactions"][0]["loss_mask"])
    folder.write_trajectories(9, [dataclasses.replace(forked, id="x/9")])
    assert "step 9 has not been trained yet" in show("x/9", tokens=True)
    folder.write_eval(9, [dataclasses.replace(forked, id="x/e")], {}, label="e")
    assert "it is of an evaluation" in show("x/e", tokens=True)


def test_one_trajectory_with_its_tokens(show) -> None:
    text = show("000001.000/0", tokens=True)
    assert "-0.5000" in text
    assert text.count("trained") == 4
    assert "--tokenizer" in text
    assert "no token ids are stored" in text


def test_tokens_have_their_gap_to_the_trainer(folder: RunFolder, show, show_json) -> None:
    assert "gap" not in show("000001.000/0", tokens=True)
    folder.write_proximal_logprobs(1, {"c1": np.array([math.nan, -1.0], np.float32)})
    text = show("000001.000/0", tokens=True)
    assert text.count("gap") == 1
    assert "0.7500" in text
    calls = show_json("000001.000/0", tokens=True)["interactions"]
    assert [call["proximal_logprobs"] for call in calls] == [[None, -1.0], None, None, None]


def test_token_texts_come_from_the_last_checkpoint(folder: RunFolder, show) -> None:
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({f"word{i}": i for i in range(10)}, unk_token="word0"))
    with folder.new_checkpoint(2) as path:
        tokenizer.save(str(path / "tokenizer.json"))
    assert "word7" in show("000001.000/0", tokens=True)


def test_a_tokenizer_that_is_none(folder: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for named, expected in (("nowhere", "no such folder"), (str(tmp_path), "is not a tokenizer")):
        with pytest.raises(UserInputError, match=expected):
            inspect_run(
                folder.path,
                "000001.000/0",
                TrajectoryQuery(),
                tokens=True,
                tokenizer_path=named,
                console=Console(file=io.StringIO()),
            )


def test_mismatches_are_summed_over_the_run_with_their_remedy(folder: RunFolder, show) -> None:
    folder.write_trajectories(3, [make_mismatched("000003.000/0"), make_mismatched("000003.000/1")])
    text = show()
    assert "prefix mismatches over all steps" in text
    row = next(line.split() for line in text.splitlines() if "thinking_stripped" in line)
    # Each of the two: one of one turn broke, 4 tokens re-prefilled, 3 sampled ones departed.
    assert row[:5] == ["thinking_stripped", "2", "50%", "8", "6"]
    assert "engine.keep_reasoning=true" in text
    assert "2 (100%)" in next(
        line for line in text.splitlines() if line.strip().startswith("step 3")
    )
    listed = show(mismatch="thinking_stripped")
    assert "prefix mismatches in these trajectories" in listed
    assert "000003.000/1" in listed
    assert "000001.000/0" not in listed
    one = show("000003.000/0")
    assert (
        "prefix mismatch: thinking_stripped: 4 prompt tokens re-prefilled, 3 sampled tokens" in one
    )
    assert "prefix mismatches in this trajectory" in one
    assert "engine.keep_reasoning=true" in one
    assert "000003.000/0" not in show(mismatch="none")
    assert "000001.000/0" in show(mismatch="any", steps="1")


def test_prefix_mismatches_in_json(folder: RunFolder, show_json) -> None:
    folder.write_trajectories(3, [make_mismatched("000003.000/0")])
    found = show_json()["prefix_mismatches"]
    assert found["by_cause"]["thinking_stripped"]["num_reprefilled_tokens"] == 4
    assert "keep_reasoning" in found["by_cause"]["thinking_stripped"]["remedy"]
    one = show_json("000003.000/0")
    assert one["prefix_mismatches"]["mismatch_fraction"] == 1.0
    assert [i["num_dropped_tokens"] for i in one["interactions"]] == [0, 3]
    listed = show_json(steps="3")["trajectories"][0]
    assert listed["prefix_mismatches"]["by_cause"]["thinking_stripped"]["num_turns"] == 1


def make_mismatched(name: str) -> Trajectory:
    first = Interaction(
        id="c1", prompt_ids=(1, 2), completion_ids=(3, 4, 5), versions=(0,) * 3, started=1, ended=2
    )
    second = Interaction(
        id="c2",
        parent_id="c1",
        mismatch_cause=MismatchCause.THINKING_STRIPPED,
        prompt_ids=(1, 8, 8, 8, 8, 8),
        completion_ids=(6,),
        versions=(0,),
        started=3,
        ended=4,
    )
    return Trajectory(id=name, group_id="g", task_id="0", step=3, interactions=(first, second))


def test_json_is_strict_and_complete(show_json, forked: Trajectory) -> None:
    steps = show_json()
    assert [s["step"] for s in steps["steps"]] == [1, 2]
    assert steps["steps"][1]["num_unscored"] == 2
    assert [e["label"] for e in steps["evals"]] == [None, "manual"]
    listed = show_json(steps="2")
    assert [t["reward"] for t in listed["trajectories"]] == [0.5, None, None, 1.0]
    one = show_json("000001.000/0")
    assert one["interactions"][1]["reply"]["content"] == "391"
    assert one["interactions"][1]["mismatch_cause"] is None
    assert "completion_ids" not in one["interactions"][0]
    full = show_json("000001.000/0", tokens=True)
    assert full["interactions"][0]["completion_ids"] == [4, 5]
    assert full["interactions"][0]["loss_mask"] == [False, False, False, True, True]
    assert full["step"] == forked.step


def test_a_damaged_step_is_a_row_and_a_reason(folder: RunFolder, show) -> None:
    (folder.path / "trajectories" / "step-000002.parquet").write_bytes(b"PAR1")
    text = show()
    assert "damaged" in text
    assert "step-000002.parquet: is damaged" in text
    assert "eval 0" in text


def test_a_run_that_has_just_begun(config, capsys) -> None:
    with RunFolder.create_or_resume(config) as run:
        inspect_run(run.path, None, TrajectoryQuery())
    assert "nothing is stored yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([4], "4"), ([1, 2], "1-2"), ([1, 3, 4, 5, 9], "1, 3-5, 9")],
)
def test_ranges_of_steps(numbers: list[int], text: str) -> None:
    assert format_ranges(numbers) == text


def test_one_line_an_alarm_in_the_order_in_which_they_triggered() -> None:
    alarms = {7: ["truncated"], 3: ["logprob_gap"], 4: ["logprob_gap", "truncated"], 9: ["other"]}
    assert format_alarms(alarms) == [
        "alarm logprob_gap active in steps 3-4",
        "alarm truncated active in steps 4, 7",
        "alarm other active in step 9",
    ]
    assert format_alarms({}) == []


def test_steps_name_their_active_alarms(folder: RunFolder, show, show_json) -> None:
    assert "alarm" not in show()
    for step in (1, 2):
        flags = {"alarm_truncated": float(step == 2), "alarm_kl_of_update": 0.0}
        folder.append_metrics({"step": step} | flags)
    text = show()
    rows = {line.split()[1]: line for line in text.splitlines() if line.strip().startswith("step")}
    assert "truncated" not in rows["1"]
    assert rows["2"].rstrip().endswith("truncated")
    assert "kl_of_update" not in text
    assert "alarm truncated active in step 2" in text
    assert [step["alarms"] for step in show_json()["steps"]] == [[], ["truncated"]]
