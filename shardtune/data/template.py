"""How does a row become text? A template's last column is the answer, what stands before it the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter

from shardtune.errors import UserInputError


@dataclass(frozen=True)
class Template:
    """A parsed `data.prompt_template`.

    Example:
        >>> Template.parse("{question} => {answer}!").render({"question": "1+1", "answer": "2"})
        ('1+1 => ', '2!')
    """

    parts: tuple[tuple[str, str | None], ...]  # (literal text, column after it or None)

    @classmethod
    def parse(cls, text: str) -> Template:
        """Raises UserInputError for unbalanced braces, positional or computed fields, or no field at all."""
        try:
            fields = list(Formatter().parse(text))
        except ValueError as error:
            raise UserInputError(
                "data.prompt_template has unbalanced braces.",
                why=str(error),
                fix="Write {column} for a column and {{ or }} for a literal brace.",
            ) from error
        written = [
            name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            for _, name, spec, conversion in fields
            if name is not None
        ]
        columns = [name for _, name, _, _ in fields if name is not None]
        if not written or written != columns or not all(name.strip() for name in columns):
            raise UserInputError(
                "data.prompt_template must name columns as {column}.",
                why=f"Found: {', '.join('{' + name + '}' for name in written) or 'no column'}.",
                fix='For example "{instruction}\\n\\n{response}"; write {{ and }} for literal braces.',
            )
        return cls(tuple((literal, name) for literal, name, _, _ in fields))

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for _, name in self.parts if name is not None))

    @property
    def answer(self) -> str:
        """The column that is the answer."""
        return next(name for _, name in reversed(self.parts) if name is not None)

    @property
    def tail(self) -> str:
        """Literal text behind the answer."""
        last = max(index for index, (_, name) in enumerate(self.parts) if name is not None)
        return "".join(literal for literal, _ in self.parts[last + 1 :])

    def render(self, row: Mapping[str, object]) -> tuple[str, str]:
        """(prompt, completion) of one row; the completion starts at the last column."""
        last = max(index for index, (_, name) in enumerate(self.parts) if name is not None)
        prompt = "".join(
            literal + (str(row[name]) if name is not None and index < last else "")
            for index, (literal, name) in enumerate(self.parts[: last + 1])
        )
        return prompt, str(row[self.parts[last][1] or ""]) + self.tail
