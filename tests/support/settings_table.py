"""The tables of docs/configuration.md. `python -m tests.support.settings_table` writes them into the page."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from server.gateway_settings import GATEWAY_OWN_SETTINGS
from server.setting_values import format_size
from server.settings import SETTINGS, Setting, metavar
from server.worker.settings import OWN_SETTINGS

PAGE = Path(__file__).parent.parent.parent / "docs" / "configuration.md"
BEGIN, END = "<!-- settings: made from server/settings.py -->\n", "<!-- end of settings -->\n"


def table() -> str:
    """One table for each section of the settings; those that only a worker or a gateway has come last."""
    rows = (*SETTINGS, *OWN_SETTINGS, *GATEWAY_OWN_SETTINGS)
    return "\n".join(_section(name, list(rows)) for name, rows in groupby(rows, key=lambda one: one.section))


def page_with_table(page: str) -> str:
    """The page with everything between the marks replaced."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


def _section(name: str, settings: list[Setting]) -> str:
    rows = [f"### {name}", "", "| flag | values | default | |", "| --- | --- | --- | --- |"]
    rows += [f"| `{one.flag}` | {_values(one)} | {_default(one)} | {one.help} |" for one in settings]
    return "\n".join([*rows, ""])


def _values(setting: Setting) -> str:
    if setting.is_switch:
        return f"`--{setting.name}`, `--no-{setting.name}`"
    if setting.allowed:
        return ", ".join(f"`{one}`" for one in setting.allowed)
    if setting.kind == "plain" and setting.low is not None:
        return f"{setting.low:g} to {setting.high:g}" if setting.high is not None else f"{setting.low:g} or more"
    return metavar(setting)


def _default(setting: Setting) -> str:
    default = setting.default
    if default is None or default == ():
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    if setting.kind == "size" and isinstance(default, int):
        return format_size(default)
    return f"{default:g}s" if setting.kind == "duration" else f"`{default}`"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
