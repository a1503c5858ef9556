"""``python -m docs.tools``: write tables, plots, drawings and the notebook's outputs again."""

from __future__ import annotations

from docs.tools import drawings, notebook, plots, tables

if __name__ == "__main__":
    for page in tables.PAGES:
        tables.write(page)
    plots.draw_all()
    drawings.draw_all()
    notebook.store()
