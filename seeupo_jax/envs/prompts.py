"""`prompts`: questions of a file, and a checker of answers; one turn, or several with retries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seeupo_jax.envs.base import Demonstration, Message, StepResult, Tool, check_choice
from seeupo_jax.envs.checkers import make_checker
from seeupo_jax.envs.thoughts import thoughts_end
from seeupo_jax.tasks.prompt_tasks import TEST_SHARE, Prompt, PromptColumns, PromptTasks
from seeupo_jax.tasks.templates import RowTemplate, value_of

_AGAIN = "The answer is wrong. Try again."  # where a checker has no message


@dataclass
class Prompts:
    """The environment: docs/prompts.md.

    Args:
      file: a file .jsonl, .json, .csv, .tsv, .parquet or .arrow, a folder of `save_to_disk`,
        tfds:NAME, or a function module:function; or one of them for each split.
      prompt: the column of the prompts, each a text or a list of messages. None: `prompt`, or with
        `template` no column.
      answer: the column that the checker compares answers with; `a.b`: entry b of the column a.
      check, check_options: a checker's name and options, or weights of several, as of
        `make_checker`; None: `exact` with an answer, else no checker: every score is 0, and rewards
        come from `config.rewards`.
      system: text of a system message before each prompt.
      template: the prompt as a text with columns in braces, in place of the column `prompt`.
      retries: further turns after a wrong answer; each begins with the checker's message.
      split_column: the column with the splits' names, if the file has it.
      test_share: share of the rows that is the split `test`, for a file without splits; None: 0.1.
      split_seed: of the draw of these rows.
      label_columns: columns that are labels of a task, for statistics.
      empty: `error` or `skip`, for rows without a prompt or an answer.
      file_options: of the function.
    """

    file: str | Mapping[str, str]
    prompt: str | None = None
    answer: str | None = None
    check: str | Mapping[str, float] | None = None
    check_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    system: str | None = None
    template: str | None = None
    retries: int = 0
    split_column: str = "split"
    test_share: float | None = None
    split_seed: int = 0
    label_columns: Sequence[str] = ()
    empty: str = "error"
    file_options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        self._check_options()
        template = None if self.template is None else RowTemplate(self.template, "prompts template")
        column = "prompt" if self.prompt is None and template is None else self.prompt
        if template is not None and column is not None and column not in template.columns:
            raise ValueError(
                f"prompts template: got {self.template!r} without {{{column}}}; allowed: a text"
                " with the column that the option prompt names, or no option prompt."
            )
        columns = PromptColumns(column, self.answer, self.system, template, self.split_column)
        self._tasks = PromptTasks(
            self.file,
            columns,
            options=self.file_options,
            test_share=self.test_share,
            seed=self.split_seed,
            empty=self.empty,
        )
        name = "exact" if self.check is None and self.answer is not None else self.check
        self._checker = (
            None if name is None else make_checker(name, self.check_options, self.answer)
        )
        self._prompt: Prompt | None = None
        self._turns, self._score, self._done = 0, 0.0, False

    def task_ids(self, split: str) -> Sequence[str]:
        """Returns the tasks of a split; the first call in a process reads and checks every row."""
        return self._tasks.ids(split, self._check_prompt, f"{self.check} {self.check_options}")

    def reset(self, task_id: str, seed: int) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """Starts an episode; `seed` is unused."""
        self._prompt = self._tasks.find(task_id)
        self._turns, self._score, self._done = 0, 0.0, False
        return self._prompt.messages, ()

    def step(self, text: str) -> StepResult:
        """Checks an answer; the rewards of the steps add up to the score of the last one."""
        prompt = self._running()
        if self._done:
            raise ValueError("prompts: got an answer after the last one; allowed: reset() first.")
        score, message = self._judge(text, prompt)
        reward, self._score = score - self._score, score
        self._turns += 1
        self._done = score == 1 or self._turns > self.retries
        reply = () if self._done else ({"role": "user", "content": message or _AGAIN},)
        # The prompt is among the messages already.
        data = {name: value for name, value in prompt.row.items() if name != self.prompt}
        info = {"answer": prompt.answer, "row": data, "check": message, "attempts": self._turns}
        return StepResult(reply, reward, self._done, info)

    def score(self) -> float:
        self._running()
        return self._score

    def close(self) -> None:
        self._prompt = None
        if self._checker is not None:
            self._checker.close()

    def labels(self, task_id: str) -> Mapping[str, str]:
        """The values of `label_columns`."""
        if not self.label_columns:
            return {}
        row = self._tasks.find(task_id).row
        return {name: str(value_of(row, name)) for name in self.label_columns}

    def reference(self, task_id: str) -> str | None:
        """The answer column's value."""
        answer = self._tasks.find(task_id).answer
        return None if answer is None else str(answer)

    def demonstrations(
        self, split: str, *, answer: str | None = None, episodes: int | None = None
    ) -> Sequence[Demonstration]:
        """Prompts of a split with the answers to imitate.

        Args:
          answer: the column of these answers; None: that of the option `answer`.
          episodes: how many, from the first; None: all.
        """
        column = self.answer if answer is None else answer
        if column is None:
            raise ValueError(
                "prompts: got no column of answers to imitate; allowed: the option answer of the"
                " environment or of its demonstrations."
            )
        return PromptDemonstrations(self._tasks, self.task_ids(split)[:episodes], column)

    def vocabulary(self) -> Sequence[str]:
        """No word: a tokenizer made for these prompts finds its own pieces."""
        return ()

    def _judge(self, text: str, prompt: Prompt) -> tuple[float, str]:
        if self._checker is None:
            return 0.0, ""
        if not self._checker.reads_thoughts:
            text = text[thoughts_end(text) :].strip()
        result = self._checker.check(text, self._checked_row(prompt))
        return result.score, result.message

    def _check_prompt(self, prompt: Prompt) -> None:
        """ValueError where the checker cannot read the row of a task."""
        if self._checker is not None:
            self._checker.check_row(self._checked_row(prompt))

    def _checked_row(self, prompt: Prompt) -> Mapping[str, Any]:
        """The row, also with an answer that lies within another column."""
        return prompt.row if self.answer is None else {**prompt.row, self.answer: prompt.answer}

    def _running(self) -> Prompt:
        if self._prompt is None:
            raise ValueError("prompts: reset() must come before step() and score().")
        return self._prompt

    def _check_options(self) -> None:
        for option in ("retries", "split_seed"):
            value = getattr(self, option)
            if type(value) is not int or value < 0:
                raise ValueError(f"prompts {option}: got {value!r}; allowed: a whole number >= 0.")
        share = self.test_share
        if share is not None and not (isinstance(share, int | float) and 0 <= share < 1):
            raise ValueError(
                f"prompts test_share: got {share!r}; allowed: a number from 0 to below 1, or none"
                f" for {TEST_SHARE}."
            )
        check_choice("prompts empty", self.empty, ("error", "skip"))
        texts = ("prompt", "answer", "system", "template")
        for option in (name for name in texts if getattr(self, name) is not None):
            value = getattr(self, option)
            if not isinstance(value, str) or not value:
                raise ValueError(f"prompts {option}: got {value!r}; allowed: a text, or none.")
        if self.retries and self.check is None and self.answer is None:
            raise ValueError(
                f"prompts retries: got {self.retries} without a checker; allowed: 0, or the option"
                " answer or check."
            )


class PromptDemonstrations(Sequence[Demonstration]):
    """Prompts and the answers to imitate, each read when it is asked for."""

    def __init__(self, tasks: PromptTasks, ids: Sequence[str], column: str):
        self._tasks, self._ids, self._column = tasks, ids, column

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> Demonstration:
        prompt = self._tasks.find(self._ids[index])
        answer = value_of(prompt.row, self._column)
        if answer is None:
            raise ValueError(
                f"{prompt.place}: got no {self._column}; allowed: an answer to imitate."
            )
        return Demonstration((*prompt.messages, {"role": "assistant", "content": str(answer)}))
