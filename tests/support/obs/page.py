"""An HTML page as its tags, attributes and text, and the data of its charts."""

from html.parser import HTMLParser

import msgspec

from areal_lora.obs.report.page import PageData


class Page(HTMLParser):
    """Collects tags, attributes, scripts and the other text; checks that tags close in order."""

    VOID = frozenset({"meta"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.scripts: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["script"]:
            self.scripts.append(data)
        elif self._open[-1:] != ["style"]:
            self.text += data

    @property
    def data(self) -> PageData:
        return msgspec.json.decode(self.scripts[0], type=PageData)

    def titles(self, section: str = "run") -> list[str]:
        """Of the charts of a section."""
        return [chart.title for found in self.data.sections if found.id == section for chart in found.charts]
