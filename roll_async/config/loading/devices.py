"""`device_mapping`: a list of ints, or one of four texts matched by a regular expression, never evaluated."""

import re

from roll_async.config.yaml.node import Plain

MAX_DEVICES = 65_536
_NUMBER = r"\s*(-?[0-9]{1,18})\s*"  # len() of a range must fit 64 bits
_FORMS = (
    re.compile(rf"\s*list\(\s*range\({_NUMBER},{_NUMBER}\)\s*\)\s*"),
    re.compile(rf"\s*range\({_NUMBER},{_NUMBER}\)\s*"),
    re.compile(rf"\s*range\({_NUMBER}\)\s*"),
    re.compile(r"\s*([0-9]{1,18})\s*-\s*([0-9]{1,18})\s*"),
)


def parse_devices(value: Plain) -> tuple[tuple[int, ...] | None, str]:
    """(ids, "") or (None, what is wrong); ("", i.e. None and no reason) means it is no device list at all.

    Examples: `list(range(0,4))`, `range(0, 4)`, `range(4)`, `0-3` and `[0, 1, 2, 3]` are the same four devices.
    """
    ids = _ids(value)
    if ids is None:
        return None, ""
    if not ids:
        return None, "empty"
    # min() would walk over a range, which may have 10**18 numbers.
    lowest, highest = (min(ids), max(ids)) if isinstance(ids, list) else (ids[0], ids[-1])
    if lowest < 0:
        return None, f"negative device {lowest}"
    if len(ids) > MAX_DEVICES:
        return None, f"more than {MAX_DEVICES} devices"
    if highest >= MAX_DEVICES:
        return None, f"device {highest} is above {MAX_DEVICES - 1}"
    seen: set[int] = set()
    for i in ids:
        if i in seen:
            return None, f"device {i} twice"
        seen.add(i)
    return tuple(ids), ""


def _ids(value: Plain) -> list[int] | range | None:
    if isinstance(value, list):
        ids = [i for i in value if isinstance(i, int) and not isinstance(i, bool)]
        return ids if len(ids) == len(value) else None
    if not isinstance(value, str):
        return None
    for form in _FORMS:
        if match := form.fullmatch(value):
            numbers = [int(g) for g in match.groups()]
            first, last = (0, numbers[0]) if len(numbers) == 1 else numbers
            return range(first, last + 1 if form is _FORMS[-1] else last)  # a-b includes b
    return None
