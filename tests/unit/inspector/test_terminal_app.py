"""The full-screen application, driven by keys."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from textual.events import Key
from textual.pilot import Pilot
from textual.widgets import Input
from tokenizers import Tokenizer, models

from agentrl_cli.errors import UserInputError
from agentrl_cli.inspector.terminal_app import list_screens
from agentrl_cli.inspector.terminal_app.application import InspectorApp, run_application
from agentrl_cli.inspector.terminal_app.inspector_screen import KeysScreen
from agentrl_cli.inspector.terminal_app.lines_view import Column, fit_columns
from agentrl_cli.inspector.terminal_app.run_reader import RunReader
from agentrl_cli.inspector.terminal_app.trajectory_screens import lay_out_tokens
from agentrl_cli.records import Boundary, StopReason, Trajectory
from agentrl_cli.store.run_folder import RunFolder
from tests.unit.inspector.conftest import make_forked, make_simple

EVIL = "\x1b[2J[bold red]x[/] \x07 [@click=app.quit]日本語[/] \u202e end"


class Driver:
    """The application, and what is on its screen."""

    def __init__(self, pilot: Pilot[None]) -> None:
        self.pilot = pilot
        self.app = pilot.app

    async def press(self, *keys: str) -> str:
        """Types keys one after the other; what is on the screen when all is loaded."""
        for key in keys or ("",):
            if key:
                await self.pilot.press(key)
            for _ in range(500):
                await self.pilot.pause(0.01)
                if all(w.is_finished or w.group == "follow" for w in self.app.workers):
                    break
            await self.pilot.pause()
        return self.text

    @property
    def text(self) -> str:
        strips = self.app.screen._compositor.render_strips(self.app.size)
        return "\n".join(strip.text.rstrip() for strip in strips)

    @property
    def rows(self) -> list[str]:
        """The lines of the table or text, those that are not on the screen, too."""
        lines = self.app.screen.lines
        return [lines.build_strip(n, 80).text.strip() for n in range(lines.num_lines)]


@asynccontextmanager
async def opened(
    folder: RunFolder, size: tuple[int, int] = (80, 24), tokenizer: str | None = None
) -> AsyncIterator[Driver]:
    folder.flush()
    reader = RunReader(RunFolder.open(folder.path), tokenizer)
    try:
        async with InspectorApp(reader).run_test(size=size) as pilot:
            driver = Driver(pilot)
            await driver.press()
            yield driver
    finally:
        reader.close()


def make_group(step: int, rewards: Sequence[float], **changes: object) -> list[Trajectory]:
    return [
        dataclasses.replace(
            make_forked(),
            id=f"{step:06d}.007/{number}",
            group_id=f"{step:06d}.007",
            sample_index=number,
            step=step,
            reward=reward,
            **changes,
        )
        for number, reward in enumerate(rewards)
    ]


async def test_enter_leads_from_steps_to_tokens_and_escape_back(folder: RunFolder) -> None:
    for step in (1, 2):
        folder.append_metrics({"step": step, "reward_mean": step / 2, "reward_std": 0.25})
    async with opened(folder) as ui:
        assert [row.split()[:2] for row in ui.rows] == [
            ["eval", "2"],
            ["step", "2"],
            ["step", "1"],
            ["eval", "0"],
        ]
        assert "reward ▅█  0.500 to 1.000" in ui.text
        assert "0.250" in ui.rows[1]
        text = await ui.press("down", "down", "enter")
        assert "› step 1  (3 of 4)" in text
        assert "000001.000   5" in ui.rows[0]
        text = await ui.press("enter")
        assert "task 5: What is 17 x 23?" in text
        assert len(ui.rows) == 2
        text = await ui.press("enter")
        assert "branch 2 of 2" in text
        assert "calls calculate" in text
        assert "1 call that did not complete" in text
        text = await ui.press("tab", "tab", "enter")
        assert "call 2  (2 of 4)" in text
        assert "id 7  logprob -0.1250  version 4  trained" in text
        assert "call 3" in await ui.press("n")
        text = await ui.press("n")
        assert "no token ids are stored for this call, which failed" in text
        await ui.press("escape")
        assert "failed: the engine died" in ui.rows[ui.app.screen.lines.cursor]
        await ui.press("escape", "escape", "escape", "escape")
        assert ui.app.screen.table.row.source.name == "step 1"
        await ui.press("q")
    assert ui.app.return_code == 0


async def test_siblings_follow_each_other_in_the_order_of_the_list(folder: RunFolder) -> None:
    folder.write_trajectories(3, make_group(3, [0.25, 0.75, 0.5]))
    async with opened(folder) as ui:
        await ui.press("enter", "enter", "s")
        assert [row.split()[1] for row in ui.rows] == ["0.750", "0.500", "0.250"]
        assert "000003.007/1  (1 of 3)" in await ui.press("home", "enter")
        assert "000003.007/2  (2 of 3)" in await ui.press("n")
        assert "000003.007/2  (2 of 3)" in await ui.press("n", "p")
        await ui.press("escape")
        assert ui.app.screen.table.row.summary.id == "000003.007/2"
        await ui.press("S")
        assert [row.split()[1] for row in ui.rows] == ["0.250", "0.500", "0.750"]
        assert ui.app.screen.table.row.summary.id == "000003.007/2", "the cursor stays on its row"


async def test_filters_and_search_are_said_and_narrow_the_list(folder: RunFolder) -> None:
    cut = make_group(3, [0.0], stop_reason=StopReason.MAX_TURNS, final_answer="Unicorn")
    folder.write_trajectories(3, [*cut, make_simple(3, 1, None, Boundary.TOOL)])
    async with opened(folder) as ui:
        assert "filter: failed" in await ui.press("f")
        assert [row[:6] for row in ui.rows] == ["step 3", "step 2"]
        await ui.press("enter", "t")
        assert "› step 3 › trajectories" in ui.text
        assert len(ui.rows) == 2
        for name, found in (("failed", 1), ("malformed", 0), ("cut", 1), ("mismatches", 1)):
            assert f"filter: {name}" in await ui.press("f")
            assert len(ui.rows) == found, name
        text = await ui.press("f", "slash", *"UNIC")
        assert "1 of 2 trajectories  with 'UNIC'" in text
        assert "Unicorn" in text
        await ui.press("enter", "enter")
        assert "000003.007/0" in ui.text
        await ui.press("slash", *"391.", "enter")
        assert "It is 391." in ui.rows[ui.app.screen.lines.cursor]
        await ui.press("escape", "slash", "escape")
        assert len(ui.rows) == 2
        assert not ui.app.screen.query_one(Input).display


async def test_keys_that_come_faster_than_the_screen_changes(folder: RunFolder) -> None:
    async with opened(folder) as ui:
        ui.app.screen.action_search()
        for key in "step 1":
            ui.app.screen.focused.post_message(Key(key, key))
        assert "with 'step 1'" in await ui.press("enter")
        for _ in range(2):
            ui.app.screen.lines.action_open()
        await ui.press()
        await ui.press("escape")
        assert len(ui.app.screen_stack) == 2


async def test_a_live_run_grows_on_the_screen(folder: RunFolder, monkeypatch) -> None:
    monkeypatch.setattr(list_screens, "_FOLLOW_SECONDS", 0.05)
    async with opened(folder) as ui:
        await ui.press("down")
        assert ui.app.screen.table.row.source.name == "step 2"
        folder.write_trajectories(3, make_group(3, [1.0, 0.0]))
        folder.append_metrics({"step": 3, "reward_mean": 0.5, "alarm_truncated": 1.0})
        for _ in range(200):
            await ui.pilot.pause(0.05)
            if ui.rows[0].startswith("step 3") and "truncated" in ui.rows[0]:
                break
        assert "0.500" in ui.rows[0]
        assert ui.app.screen.table.row.source.name == "step 2", "the cursor stays on its row"


async def test_a_damaged_file_is_told_in_its_place(folder: RunFolder) -> None:
    folder.flush()
    path = folder.path / "trajectories" / "step-000002.parquet"
    whole = path.read_bytes()
    path.write_bytes(b"PAR1")
    async with opened(folder) as ui:
        assert "damaged" in ui.rows[1]
        text = await ui.press("down", "enter")
        assert "step-000002.parquet: is damaged" in text
        assert "000001.000" in await ui.press("n")
        assert "is damaged" in await ui.press("p")
        # The pages between the footer's marks are damaged, and only reading them tells.
        path.write_bytes(whole[:4] + bytes(len(whole) // 2) + whole[4 + len(whole) // 2 :])
        assert "is damaged" in await ui.press("escape", "enter")
        # An open screen keeps its siblings; the list of steps would be read again.
        await ui.press("n")
        path.unlink()
        assert "step 2 is not stored" in await ui.press("p")


@pytest.mark.slow
@pytest.mark.parametrize("size", [(80, 24), (40, 10), (12, 4)])
async def test_hostile_text_neither_styles_nor_breaks_any_screen(
    folder: RunFolder, size: tuple[int, int]
) -> None:
    trajectories = make_group(3, [0.0, 1.0], task={"question": EVIL}, final_answer=EVIL)
    folder.write_trajectories(3, trajectories)
    with folder.new_checkpoint(3) as path:
        words = {f"{EVIL} {number}": number for number in range(10)}
        Tokenizer(models.WordLevel(words, unk_token=next(iter(words)))).save(
            str(path / "tokenizer.json")
        )
    width = size[0]
    async with opened(folder, size) as ui:
        shown = [ui.text]
        for keys in (["enter"], ["enter"], ["enter"], ["enter"], ["m", "right"]):
            shown.append(await ui.press(*keys))
            strips = ui.app.screen._compositor.render_strips(ui.app.size)
            assert all(strip.cell_length == width for strip in strips)
        assert not any(c in text for text in shown for c in "\x1b\x07\u202e")
        if width == 80:
            assert "\\x1b[2J[bold red]x[/]" in shown[2]
            assert "日本語" in shown[3]
            assert "[@click=app.quit]" in shown[4]
        await ui.press("question_mark")
        assert isinstance(ui.app.screen, KeysScreen)
        await ui.press("escape", "escape")
        await ui.pilot.resize_terminal(100, 30)
        assert "› 000003.007/0" in await ui.press()


async def test_tokens_are_coloured_by_logprob_version_and_mask(folder: RunFolder) -> None:
    folder.append_metrics({"step": 1})
    async with opened(folder) as ui:
        await ui.press("end", "up", "enter", "enter", "enter", "enter")
        view = ui.app.screen.view
        tokens = view.tokens
        assert ui.rows == ["1 2 3 4 5"]
        assert "ids, as no tokenizer is stored" in ui.text

        def styles() -> list[object]:
            return [(s.color, s.bgcolor, s.dim) for s in map(view.style_token, tokens)]

        by_logprob = styles()
        assert len(set(by_logprob[:3])) == 1
        unlikely = dataclasses.replace(tokens[3], logprob=-4.0)
        assert len({by_logprob[0], by_logprob[3]}) == 2
        assert view.style_token(unlikely) != view.style_token(tokens[3])
        assert "policy version: 3 4" in await ui.press("m")
        assert styles()[3] != styles()[4]
        assert "mask: trained not trained" in await ui.press("m")
        assert styles()[3] == styles()[4] != styles()[0]
        assert "0: id 1  prompt  not trained" in await ui.press("left", "left", "left")


async def test_tokens_are_coloured_by_the_gap_where_the_trainer_has_computed_any(
    folder: RunFolder,
) -> None:
    folder.write_proximal_logprobs(1, {"c1": np.array([-1.25, -0.25], np.float32)})
    async with opened(folder) as ui:
        await ui.press("end", "up", "enter", "enter", "enter", "enter")
        assert "gap |engine - trainer|: 0.5 nats and more 0.2" in await ui.press("m")
        view = ui.app.screen.view
        styles = [view.style_token(token) for token in view.tokens[2:]]
        assert len(set(styles)) == 3
        assert "3: id 4  logprob -0.5000  gap 0.7500  version 3" in ui.text
        assert "policy version: 3 4" in await ui.press("m")


@pytest.mark.slow
async def test_the_mouse_moves_opens_and_sorts(folder: RunFolder) -> None:
    folder.write_trajectories(3, make_group(3, [0.25, 0.75, 0.5]))
    async with opened(folder) as ui:
        await ui.press("enter", "enter")
        head = ui.app.screen.table.head
        place = head.render().plain.index("reward")
        await ui.pilot.click(head, offset=(place, 0))
        assert [row.split()[1] for row in ui.rows] == ["0.750", "0.500", "0.250"]
        await ui.pilot.click(ui.app.screen.table, offset=(3, 1), times=2)
        assert "000003.007/2  (2 of 3)" in await ui.press()


def test_columns_go_where_there_is_room() -> None:
    columns = [
        Column("a", str, 4),
        Column("b", str, 4, rank=1),
        Column("c", str, 6, share=1, rank=2),
    ]

    def fit(width: int) -> list[tuple[str, int]]:
        return [(column.title, cells) for column, cells in fit_columns(columns, width)]

    assert fit(30) == [("a", 4), ("b", 4), ("c", 18)]
    assert fit(18) == [("a", 4), ("b", 4), ("c", 6)]
    assert fit(17) == [("a", 4), ("b", 4)]
    assert fit(3) == [("a", 3)]


def test_tokens_fill_lines_and_newlines_end_them() -> None:
    lines, first_lines = lay_out_tokens(["ab", "cd", "\n", "日本語日本", "e\n\n", "x"], 4)
    assert [[piece.text for piece in line] for line in lines] == [
        ["ab", "cd"],
        ["⏎"],
        ["日本"],
        ["語日"],
        ["本", "e⏎"],
        ["⏎"],
        ["x"],
    ]
    assert first_lines == [0, 0, 1, 2, 4, 6]


def test_a_tokenizer_that_is_none_is_told_before_the_screen_is_taken(
    folder: RunFolder, tmp_path: Path
) -> None:
    with pytest.raises(UserInputError, match=r"has no tokenizer\.json"):
        run_application(folder.path, str(tmp_path))
