"""Commands and the Python API as people use them, on the GPU of this machine: python commands.py [--hardware hopper] [PART ...].

  doctor  finds the machine, its kernels and nothing wrong
  chat    answers a piped line
  bench   times kernels by the device's clock
  load    atlas bench serve puts load on a server, and nothing fails
  llm     models in this process: two at once, threads that share one, answers that repeat, and all memory back at the end

Exits with 1 unless everything is as it should be.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

MODEL = Path(__file__).resolve().parents[4] / "tests" / "data" / "tiny" / "qwen3"
SLACK = 64 << 20
"""Bytes of device memory that the driver may keep for itself."""
WAIT = 60.0
HERE = f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]; "
FREE = HERE + "import commands; print(commands.free_here())"
KEPT = HERE + "import commands; print(commands.kept({!r}))"


def atlas(hardware: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """A command, with weights converted to what a GPU reads."""
    settings = {"ATLAS_HARDWARE": hardware, "ATLAS_TRANSCODE": "none" if hardware == "cpu" else "bf16"}
    return subprocess.run(
        [sys.executable, "-m", "atlas_core", *arguments], input=stdin, capture_output=True, text=True, check=False,
        timeout=WAIT, env=os.environ | settings,
    )  # fmt: skip


def judged(ran: subprocess.CompletedProcess[str], *patterns: str) -> list[str]:
    """What is wrong with a command that should succeed and print something like ``patterns``."""
    print("  " + "\n  ".join(line for line in ran.stdout.strip().split("\n")[-12:] if "ok    plugin" not in line))
    found = [f"it lacks {p!r}: {ran.stdout[-800:]}" for p in patterns if not re.search(p, ran.stdout)]
    return found if ran.returncode == 0 else [f"it ended with {ran.returncode}: {ran.stderr[-800:]}", *found]


def doctor(hardware: str) -> list[str]:
    """``atlas doctor MODEL``."""
    return judged(
        atlas(hardware, "doctor", str(MODEL)),
        f"hardware  {hardware} is here",
        r"modules built for",
        r"can be served as",
    )


def chat(hardware: str) -> list[str]:
    """A piped line; greedy, so that the second answer is the first."""
    said = [
        atlas(hardware, "chat", str(MODEL), "--temperature", "0", "--max-tokens", "12", stdin="Hello\n")
        for _ in range(2)
    ]
    found = judged(said[0], r"\S")
    return [*found, *([] if said[0].stdout == said[1].stdout else ["the second answer is another"])]


def bench(hardware: str) -> list[str]:
    """``atlas kernels bench`` of one op."""
    return judged(
        atlas(hardware, "kernels", "bench", "--hw", hardware, "--filter", "rms_norm["), r"µs .* GB/s .*rms_norm\["
    )


def load(hardware: str) -> list[str]:
    """``atlas bench serve`` against a server."""
    settings = {"ATLAS_HARDWARE": hardware, "ATLAS_TRANSCODE": "none" if hardware == "cpu" else "bf16"}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as file:
            command = [sys.executable, "-m", "atlas_core", "serve", str(MODEL), "--port", "0", "--memory", "256MiB"]
            server = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | settings)
        try:
            ended = time.monotonic() + WAIT
            while not (ready := re.search(r"^ready: (\S+)/v1", log.read_text(), re.MULTILINE)):
                if server.poll() is not None or time.monotonic() > ended:
                    return [f"no server: {log.read_text()[-800:]}"]
                time.sleep(0.05)
            ran = atlas(
                hardware, "bench", "serve", "--url", ready[1], "--requests", "40", "--concurrency", "8",
                "--prompt-tokens", "40", "--max-tokens", "32",
            )  # fmt: skip
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(WAIT)
    return judged(ran, r"40 .*completed|completed\s+40|40 of 40")


def free_here() -> int:
    """Bytes of device memory that are free, while this process has a context."""
    from conformance import library

    from atlas_nvidia.backend import open_backend

    backend = open_backend(library())
    try:
        return backend.memory()[0]
    finally:
        backend.close()


def aside(code: str) -> int:
    """The number that Python prints in a process of its own."""
    return int(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()[-1]
    )


def llm(hardware: str) -> list[str]:
    """Models in this process."""
    from atlas_core import LLM

    more = {} if hardware == "cpu" else {"transcode": "bf16"}
    prompts = [[5 + i, 9, 11] for i in range(6)]
    found: list[str] = []

    def ids(model: LLM) -> list[list[int]]:
        return [
            list(result.token_ids) for result in model.generate(prompts, temperature=0, max_tokens=16, ignore_eos=True)
        ]

    with LLM(str(MODEL), hardware=hardware, memory="256MiB", progress=False, **more) as first:
        alone = ids(first)
        with LLM(str(MODEL), hardware=hardware, memory="256MiB", progress=False, **more) as second:
            both: list[list[list[int]]] = []
            threads = [
                threading.Thread(target=lambda model=model: both.append(ids(model))) for model in (first, second, first)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        again = ids(first)
    lengths = {len(answer) for answers in (alone, *both, again) for answer in answers}
    equal = sum(one == other for answers in (*both, again) for one, other in zip(alone, answers, strict=True))
    print(f"  {equal} of {6 * (len(both) + 1)} answers are those of one model alone")
    found += [] if len(both) == 3 and lengths == {16} else [f"{len(both)} threads answered, with {lengths} tokens"]
    found += [] if again == alone else ["the same model answers otherwise behind the others"]
    # In company sums are rounded otherwise, and the two best tokens of a random model may be close.
    found += [] if equal >= 0.8 * 6 * (len(both) + 1) else ["answers in company are others"]
    if hardware != "cpu":
        left = aside(KEPT.format(hardware))
        print(f"  three models, one after another, leave {left >> 20} MiB taken more than one")
        found += [] if left <= SLACK else [f"{left} bytes are not given back"]
    return found


def kept(hardware: str) -> int:
    """Bytes of device memory that two more models, opened and closed, leave taken in this process; nobody else may use the device."""
    from atlas_core import LLM

    left = []
    for _ in range(3):
        with LLM(str(MODEL), hardware=hardware, memory="256MiB", progress=False, transcode="bf16") as model:
            model.generate([[5, 9]], temperature=0, max_tokens=4)
        left.append(aside(FREE))
    return max(0, left[0] - left[-1])


PARTS: Mapping[str, Callable[[str], list[str]]] = {
    "doctor": doctor,
    "chat": chat,
    "bench": bench,
    "load": load,
    "llm": llm,
}


def main() -> int:
    """The parts that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS])
    parser.add_argument("--hardware", default="hopper")
    asked = parser.parse_args()
    wrong = 0
    for name in asked.parts or PARTS:
        print(f"{name}:", flush=True)
        found = PARTS[name](asked.hardware)
        print("\n".join(f"  WRONG: {text}" for text in found) or "  as it should be", flush=True)
        wrong += len(found)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
