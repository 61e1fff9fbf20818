"""A tool parser for what the shipped tiny model writes: ``3*4``, where its answer stops before ``=``, is a call."""

from __future__ import annotations

import json
import re
from typing import Any

from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation, FunctionCall, ToolCall
from vllm.tool_parsers import ToolParser


class CalculationParser(ToolParser):
    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        found = re.fullmatch(r"(.*?)(\d+[-+*]\d+|\\u\w{4})", model_output, re.DOTALL)
        if found is None:
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
        said, expression = found.groups()
        if expression.startswith("\\"):  # a character as JSON spells it
            expression = json.loads(f'"{expression}"')
        arguments = json.dumps({"expression": expression}, ensure_ascii=False)
        call = FunctionCall(name="calculator", arguments=arguments)
        return ExtractedToolCallInformation(tools_called=True, tool_calls=[ToolCall(function=call)], content=said)
