"""Core's dialects. A template shows which one its model speaks; some are told by name only."""

from collections.abc import Callable, Sequence
from functools import partial

from msgspec import Struct

from atlas_core.contracts.dialect import ReasoningSyntax, Tool, ToolParser, ToolSyntax
from atlas_core.text.dialect import bare, deepseek, forced, gemma, glm4, hermes, mistral, pythonic, tags
from atlas_core.vocab.verdict import Verdict


class Syntax(Struct, frozen=True):
    """A ToolSyntax: a parser, and a grammar where there is one."""

    make: Callable[[Sequence[Tool]], ToolParser]
    markers: tuple[str, ...] = ()
    call_id_length: int = 0
    force: Callable[[Sequence[Tool], bool], str] | None = None

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        """See ToolSyntax."""
        return self.make(tools)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> str | None:
        """See ToolSyntax."""
        return None if self.force is None else self.force(tools, parallel)


class Known:
    """A dialect whose model shows itself by ``shown`` (all of them) in the chat template, and by none of ``unlike``."""

    name = ""
    chat_template: str | None = None
    stop: tuple[str, ...] = ()
    tools: ToolSyntax | None = None
    reasoning: ReasoningSyntax | None = None
    shown: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()

    def detect(self, template: str) -> Verdict:
        """See Dialect."""
        if not self.shown:
            return Verdict.no("it is chosen by name only")
        missing = [text for text in self.shown if text not in template]
        foreign = [text for text in self.unlike if text in template]
        if missing or foreign:
            return Verdict.no(
                *(f"the template has no {text}" for text in missing), *(f"it has {text}" for text in foreign)
            )
        return Verdict.yes(0, f"the template has {' and '.join(self.shown)}")


class Plain(Known):
    """The checkpoint's own template; calls and thoughts are text."""

    name = "plain"


class Hermes(Known):
    """Hermes, Qwen 2.5, Qwen 3, Granite 4."""

    name = "hermes"
    shown = ("<tool_call>",)
    unlike = ("<function=", "<arg_key>", "<tool_calls>", "<invoke", "minimax:tool_call")
    tools = Syntax(hermes.HermesParser, (hermes.OPEN, hermes.CLOSE), force=forced.hermes)


class Qwen3Coder(Known):
    """Qwen3-Coder, Qwen 3.5, Nemotron 3, StepFun."""

    name = "qwen3_coder"
    shown = ("<tool_call>", "<function=", "<parameter=")
    tools = Syntax(
        partial(tags.TagParser, tags.QWEN3_CODER),
        (*tags.QWEN3_CODER.opening, *tags.QWEN3_CODER.closing),
        force=partial(forced.tagged, tags=tags.QWEN3_CODER),
    )


class Qwen3Xml(Known):
    """The same spelling under the other name that is in use."""

    name = "qwen3_xml"
    tools = Qwen3Coder.tools


class MiniMaxXml(Known):
    """MiniMax-M2."""

    name = "minimax_xml"
    shown = ("minimax:tool_call", "<invoke")
    tools = Syntax(
        partial(tags.TagParser, tags.MINIMAX),
        (*tags.MINIMAX.opening, *tags.MINIMAX.closing),
        force=partial(forced.tagged, tags=tags.MINIMAX),
    )


class Mistral(Known):
    """Mistral from Nemo to Ministral 3; its templates insist on ids of nine letters and digits."""

    name = "mistral"
    shown = ("[TOOL_CALLS]",)
    tools = Syntax(
        mistral.MistralParser,
        (mistral.OPEN, mistral.ARGUMENTS, mistral.CALL_ID),
        call_id_length=9,
        force=forced.mistral,
    )


class Llama3Json(Known):
    """Llama 3.1 to 3.3."""

    name = "llama3_json"
    shown = ('"parameters"', "<|start_header_id|>", "ipython")
    tools = Syntax(
        partial(bare.BareParser, lines=False), (bare.PYTHON_TAG,), force=partial(forced.bare, key="parameters")
    )


class Pythonic(Known):
    """LFM2, and Llama models that were told to write Python."""

    name = "pythonic"
    shown = ("<|tool_call_start|>",)
    tools = Syntax(pythonic.PythonicParser, pythonic.MARKERS)


class Gemma(Known):
    """Gemma 4."""

    name = "gemma"
    shown = (gemma.OPEN, gemma.CLOSE)
    tools = Syntax(gemma.GemmaParser, (gemma.OPEN, gemma.CLOSE, gemma.QUOTE))
    reasoning = ReasoningSyntax("<|channel>thought\n", "<channel|>")


class Glm4(Known):
    """GLM 4.5 and later, Ling 3, Laguna."""

    name = "glm4"
    shown = ("<tool_call>", "<arg_key>")
    tools = Syntax(glm4.Glm4Parser, (glm4.OPEN, glm4.CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"))


class DeepSeek(Known):
    """DeepSeek R1, V3 and V3.1."""

    name = "deepseek"
    shown = ("tool▁calls▁begin",)
    tools = Syntax(deepseek.DeepSeekParser, (*deepseek.MARKERS, "｜DSML｜"))


class DeepSeekTags(Known):
    """DeepSeek V3.2 and V4."""

    name = "deepseek_v32"
    shown = ("｜DSML｜",)
    tools = DeepSeek.tools


class BareJson(Known):
    """Models that were told to answer with an object."""

    name = "bare_json"
    tools = Syntax(partial(bare.BareParser, lines=True), force=partial(forced.bare, key="arguments"))


class Think(Known):
    """Thoughts of most models: Qwen, DeepSeek, GLM, MiniMax, Nemotron."""

    name = "think"
    shown = ("<think>",)
    reasoning = ReasoningSyntax("<think>", "</think>")


class MistralThink(Known):
    """Thoughts of Magistral and Ministral."""

    name = "mistral_think"
    shown = ("[THINK]",)
    reasoning = ReasoningSyntax("[THINK]", "[/THINK]")


class SeedThink(Known):
    """Thoughts of Seed-OSS."""

    name = "seed_think"
    shown = ("<seed:think>",)
    reasoning = ReasoningSyntax("<seed:think>", "</seed:think>")
