"""``python -m docs.tools``: write tables, plots, drawings and the notebook's outputs again."""

from __future__ import annotations

from docs.tools import dashboard, dashboard_picture, drawings, notebook, plots, screenshot, tables, timeline

if __name__ == "__main__":
    for page in tables.PAGES:
        tables.write(page)
    plots.draw_all()
    drawings.draw_all()
    notebook.store()
    dashboard.store()
    dashboard_picture.store()
    screenshot.store()
    timeline.store()
