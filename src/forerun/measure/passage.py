"""A text to measure with: prose and code, so that no benchmark runs on zeros or on one token."""

from __future__ import annotations

from collections.abc import Sequence

PASSAGE = """\
The harbour was quiet when the first of the boats came in. Its lamps were still lit, though the sky
had already turned the grey of slate, and the men aboard moved slowly, as people do who have been
awake since midnight. Nobody called out. A rope was thrown, caught, and made fast; the engine
coughed twice and stopped. From the far end of the quay a woman pushed a cart with six empty boxes,
counting the planks under her feet the way her mother had taught her, because three of them had
been rotten for years and only those who counted knew which.

"How much?" she asked.

"Forty, perhaps fifty kilograms," said the oldest of them. "Mackerel, most of it. The rest isn't
worth carrying." He held up a hand, and she saw that two of its fingers were wrapped in cloth. By
nine o'clock the market would be full: 12 stalls in 2019, 9 the year after, 7 now. Prices had risen
by 4.5 percent, and yet everyone earned less. That is arithmetic, the schoolmaster liked to say,
and arithmetic has no friends.

The method is simple. A sorted list is cut in half again and again, until what is left holds the
value or holds nothing, so that a million entries need no more than twenty looks:

```python
def find(values: list[int], wanted: int) -> int | None:
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if values[middle] == wanted:
            return middle
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return None


class Account:
    def __init__(self, owner: str, balance: float = 0.0) -> None:
        self.owner = owner
        self.balance = balance

    def withdraw(self, amount: float) -> None:
        if amount > self.balance:
            raise ValueError(f"{self.owner} has only {self.balance:.2f}")
        self.balance -= amount
```

Rivers carry more than water. Sand from the mountains travels for centuries before it reaches the
sea, resting in one bend for a decade, in the next for a night. Engineers who straightened the
Rhine in the nineteenth century gained farmland and lost time: a flood that once took five days
from Basel to Karlsruhe now takes two. Later generations bought some of that time back, field by
field, by letting the water in again where it does little harm.

{"name": "station 14", "position": {"latitude": 48.573, "longitude": 7.752}, "levels_cm": [312,
318, 341, 377, 402, 398], "alarm": false, "next": ["station 15", "station 17"]}
"""


def excerpt(ids: Sequence[int], start: int, length: int) -> list[int]:
    """`length` tokens from `start` on, going round where the text ends. `ids` may not be empty."""
    return [ids[(start + i) % len(ids)] for i in range(length)]


def distinct_prompts(ids: Sequence[int], count: int, length: int, start: int = 0) -> list[list[int]]:
    """`count` prompts of `length` tokens, each from another place of the text."""
    # A step without a common divisor reaches every place before it repeats one.
    step = next(n for n in range(len(ids) // 3 + 1, 2 * len(ids) + 2) if _coprime(n, len(ids)))
    return [excerpt(ids, (start + n) * step, length) for n in range(count)]


def _coprime(a: int, b: int) -> bool:
    while b:
        a, b = b, a % b
    return a == 1
