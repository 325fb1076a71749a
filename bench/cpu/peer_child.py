"""The other engine's part of ``cpu_vs_llama_cpp.py``: llama.cpp through llama-cpp-python. Same lines as atlas_child.py."""

import ctypes
import json
import resource
import sys
import time

ENTERED = time.perf_counter()

import llama_cpp as llama  # noqa: E402
import numpy as np  # noqa: E402

IMPORTED = time.perf_counter()


@llama.llama_log_callback  # type: ignore[untyped-decorator]
def quiet(level: int, text: bytes, data: object) -> None:
    """Says nothing."""


def cpu_seconds() -> float:
    """User and system time of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Session:
    """A loaded model with the library's defaults but for threads and the sizes of context and batch."""

    def __init__(self, model: str, threads: int) -> None:
        llama.llama_log_set(quiet, ctypes.c_void_p(0))
        llama.llama_backend_init()
        self.model = llama.llama_model_load_from_file(model.encode(), llama.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {model}")
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 1024, 512, 512
        params.n_threads = params.n_threads_batch = threads
        self.context = llama.llama_init_from_model(self.model, params)
        self.memory = llama.llama_get_memory(self.context)
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))

    def step(self, tokens: list[int]) -> int:
        """Decode and choose the most likely token."""
        array = (llama.llama_token * len(tokens))(*tokens)
        if llama.llama_decode(self.context, llama.llama_batch_get_one(array, len(tokens))):
            raise SystemExit("llama_decode failed")
        logits = llama.llama_get_logits_ith(self.context, -1)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())

    def run(self, prompt: list[int], tokens: int) -> list[tuple[float, float]]:
        """(CPU seconds, wall seconds) of each step: the prompt, then ``tokens`` tokens after its first."""
        llama.llama_memory_clear(self.memory, True)
        times, following = [], list(prompt)
        for _ in range(tokens + 1):
            cpu, wall = cpu_seconds(), time.perf_counter()
            following = [self.step(following)]
            times.append((cpu_seconds() - cpu, time.perf_counter() - wall))
        return times

    def logits(self, tokens: list[int]) -> np.ndarray:
        """float32 [vocabulary] after a prompt."""
        llama.llama_memory_clear(self.memory, True)
        self.step(tokens)
        return np.ctypeslib.as_array(llama.llama_get_logits_ith(self.context, -1), (self.vocabulary,)).copy()

    def describe(self) -> str:
        """What the library says of its build."""
        return f"llama-cpp-python {llama.__version__}: {llama.llama_print_system_info().decode().strip()}"


def quantise(source: str, target: str, kind: int) -> None:
    """Encode a file again, as llama-quantize does; ``kind`` is a number of llama_ftype."""
    llama.llama_log_set(quiet, ctypes.c_void_p(0))
    params = llama.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = kind, True, 1
    if llama.llama_model_quantize(source.encode(), target.encode(), params):
        raise SystemExit(f"llama.cpp cannot encode {source} again")


def main() -> None:
    """Arguments: model and threads; or ``quantise``, source, target, kind."""
    if sys.argv[1] == "quantise":
        quantise(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        return
    began = time.perf_counter()
    session = Session(sys.argv[1], int(sys.argv[2]))
    session.run([1, 2, 3, 4, 5, 6, 7, 8], 0)
    first = {
        "imports": IMPORTED - ENTERED, "first_token": time.perf_counter() - began, "flags": session.describe(),
    }  # fmt: skip
    print(json.dumps(first), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["what"] == "logits":
            np.save(request["to"], np.stack([session.logits(tokens) for tokens in request["prompts"]]))
            print(json.dumps({}), flush=True)
        else:
            print(json.dumps(session.run(request["prompt"], request["tokens"])), flush=True)


if __name__ == "__main__":
    main()
