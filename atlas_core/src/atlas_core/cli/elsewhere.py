"""What options of other servers are called here: whoever comes from one types what he knows."""

from collections.abc import Mapping

ELSEWHERE: Mapping[str, str] = {
    "--model": "name the model as the first argument: atlas serve MODEL",
    "--model-path": "name the model as the first argument: atlas serve MODEL",
    "--hf-repo": "name the model as the first argument: atlas serve MODEL",
    "--load-in-8bit": "name a checkpoint that is stored so; atlas explain shows what kernels read",
    "--quantization": "leave it out: the checkpoint says how it is stored, and atlas explain shows it",
    "--tokenizer": "leave it out: the checkpoint's own is used",
    "--trust-remote-code": "leave it out: code that a checkpoint brings is never run",
    "--download-dir": "set HF_HOME, where the Hub's library keeps models",
    "--host": "use --bind",
    "--ctx-size": "use --max-seq-len",
    "--context-length": "use --max-seq-len",
    "--max-model-len": "use --max-seq-len",
    "--max-num-seqs": "use --max-batch-size",
    "--max-running-requests": "use --max-batch-size",
    "--parallel": "use --max-batch-size",
    "--max-num-batched-tokens": "use --max-prefill-tokens",
    "--chunked-prefill-size": "use --max-prefill-tokens",
    "--batch-size": "use --max-prefill-tokens for prompts, --max-batch-size for sequences",
    "--gpu-memory-utilization": "use --memory with a size, for instance 60GiB; without it all that is free is used",
    "--mem-fraction-static": "use --memory with a size, for instance 60GiB; without it all that is free is used",
    "--enable-auto-tool-choice": "leave it out: calls of tools are read wherever the model's template has them",
    "--enable-chunked-prefill": "leave it out: long prompts always come in pieces, of --max-prefill-tokens at most",
    "--enforce-eager": "leave it out: steps are always captured, before the server is ready",
    "--disable-radix-cache": "use --no-prefix-cache",
    "--disable-log-requests": "use --log-level warning",
    "--api-server-count": "leave it out: one process serves, and another one computes",
    "--jinja": "leave it out: chat templates are always used",
}
"""Flag → what to do instead."""


def advice(flag: str) -> str | None:
    """The cure for an unknown ``flag``; None for one that nobody is known to have."""
    return ELSEWHERE.get("--" + flag.lstrip("-").partition("=")[0].replace("_", "-"))
