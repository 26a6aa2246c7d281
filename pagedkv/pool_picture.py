"""The pool of a BlockManager as an inline SVG, for notebooks."""

from itertools import groupby

CELLS, COLUMNS, PITCH = 2000, 80, 9  # at most so many cells; of a row; pixels
STATES = {"free": "#e6e6e6", "cached": "#f2c14e", "used": "#4e8fd0", "shared": "#7b4fb0"}  # a page's byte counts these
COLOURS = list(STATES.values())


def draw(text: str, pages: bytes) -> str:
    """`text`, and a cell for every so many pages: the most frequent state of them. `pages` has a byte for each."""
    each = max(1, -(-len(pages) // CELLS))
    groups = [pages[at : at + each] for at in range(0, len(pages), each)]
    cells = [max(range(len(COLOURS)), key=group.count) for group in groups]
    rows = [cells[at : at + COLUMNS] for at in range(0, len(cells), COLUMNS)]
    legend = "".join(
        f"<span style='background:{colour}'>&nbsp;&nbsp;</span> {state} &nbsp; " for state, colour in STATES.items()
    )
    size = f"width='{min(len(cells), COLUMNS) * PITCH}' height='{len(rows) * PITCH}'"
    drawn = "".join(rectangles(row, y * PITCH) for y, row in enumerate(rows))
    unit = f"(one cell: {each} page{'s' if each > 1 else ''})"
    return f"<div><pre>{text}</pre><div>{legend}{unit}</div><svg {size}>{drawn}</svg></div>"


def rectangles(cells: list[int], y: int) -> str:
    """One for each run of equal cells."""
    drawn, x = "", 0
    for state, run in groupby(cells):
        width = len(list(run)) * PITCH
        drawn += f"<rect x='{x}' y='{y}' width='{width - 1}' height='{PITCH - 1}' fill='{COLOURS[state]}'/>"
        x += width
    return drawn
