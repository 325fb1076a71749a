import pytest

from atlas_core.contracts.declarations import ModelDecl
from atlas_core.plugins import PluginRecord, Registry, discover, survey
from atlas_core.plugins.discovery import compatible
from atlas_core.vocab.errors import PluginError

TOY = """
class Plugin:
    @hookimpl
    def atlas_model_weight_loader(self):
        return ModelDecl({key!r}, "toy_heavy:Loader", aliases={aliases!r}, api={api!r})

plugin = Plugin()
"""


def toy(key="toy", aliases=(), api="1.0"):
    return TOY.format(key=key, aliases=aliases, api=api)


def record(dist: str, allow=None) -> PluginRecord:
    (found,) = [item for item in survey(allow) if item.dist == dist]
    return found


def test_a_sound_plugin_is_declared_with_its_distribution(install):
    install("toy-dist", toy(), version="3.2")
    found = record("toy-dist")
    assert (found.status, found.reason) == ("ok", "")
    assert (found.group, found.key, found.version, found.entry_point) == (
        "atlas.models",
        "toy",
        "3.2",
        "toy_dist:plugin",
    )
    assert found.declarations == (ModelDecl("toy", "toy_heavy:Loader"),)
    assert found.milliseconds > 0
    assert discover().models["toy"].loader == "toy_heavy:Loader"
    assert dict(discover().identity())["toy-dist"].startswith("3.2 ")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import toy_that_is_nowhere", "ModuleNotFoundError: No module named 'toy_that_is_nowhere'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def plugin(:", "SyntaxError"),
        ("other = 1", "AttributeError"),
        ("plugin = object()", "it implements none of atlas_model_weight_loader"),
        (toy().replace("def atlas_model_weight_loader", "def atlas_model_weight_loadr"), "atlas_model_weight_loadr"),
        (toy().replace("(self)", "(self, config)"), "config"),
        (toy().replace("return ModelDecl", 'raise ValueError("no luck")\n        ModelDecl'), "ValueError: no luck"),
        (toy().replace("return ModelDecl", "ModelDecl"), "returned None, not a ModelDecl"),
        (toy().replace("return ModelDecl(", 'return DialectDecl("toy", "a:b") or ModelDecl('), "not a ModelDecl"),
        (toy().replace("atlas_model_weight_loader", "atlas_dialect"), "may not implement atlas_dialect"),
        (toy(key="other"), "declares 'other', but its entry point is named 'toy'"),
        (toy(api="2.0"), "major versions differ"),
        (toy(api="1.9"), "upgrade atlas-core"),
        (toy(api="one"), "not of the form major.minor"),
    ],
)
def test_a_broken_plugin_costs_its_own_record_only(install, source, reason):
    install("toy-bad", source)
    install("toy-good", toy(key="good"), key="good")
    bad = record("toy-bad")
    assert bad.status == "broken"
    assert reason in bad.reason
    assert bad.declarations == ()
    registry = discover()
    assert "good" in registry.models
    assert bad.dist in {item.dist for item in registry.broken()}
    with pytest.raises(PluginError, match="asked for, and its plugin is broken") as caught:
        registry.models.require("toy")
    assert "toy-bad 1.0" in caught.value.why
    assert reason in caught.value.why
    assert "toy-bad" in caught.value.cure


def test_a_key_must_be_spelt_canonically(install):
    install("toy-dist", toy(key="Toy-1.5"), key="Toy-1.5")
    assert "canonical spelling is 'toy_1_5'" in record("toy-dist").reason


@pytest.mark.parametrize("second", [toy(), toy(key="other", aliases=("toy",))])
def test_two_owners_of_a_key_are_both_named(install, second):
    install("toy-first", toy())
    install("toy-second", second, key="toy" if second == toy() else "other")
    with pytest.raises(PluginError) as caught:
        discover()
    assert "'toy'" in caught.value.what
    assert "toy-first" in caught.value.what
    assert "toy-second" in caught.value.what
    assert "toy_first:plugin" in caught.value.why
    assert {item.status for item in survey() if item.dist.startswith("toy")} == {"ok"}
    assert discover(["toy-first"]).models.owner("toy").dist == "toy-first"


def test_two_owners_of_a_catalogue_name_are_both_named(install):
    entry = 'ModelDecl({!r}, "a:b", catalogue=(CatalogueEntry("tiny", "", "", "", ""),))'
    for key in ("toy_a", "toy_b"):
        source = toy(key=key).replace(
            f"ModelDecl({key!r}, \"toy_heavy:Loader\", aliases=(), api='1.0')", entry.format(key)
        )
        install(f"toy-{key[-1]}", source, key=key)
    with pytest.raises(PluginError, match="'tiny': toy-a and toy-b"):
        discover()


def test_a_machine_may_bring_its_vendors_toolchain_and_transport(install):
    install(
        "toy-dist",
        """
        class Plugin:
            @hookimpl
            def atlas_gpu_backend(self):
                return GpuBackendDecl("toy", "a:b", "a:c")

            @hookimpl
            def atlas_compute_target(self):
                return ComputeTargetDecl("toyvendor", "a:d")

            @hookimpl
            def atlas_comm_backend(self):
                return CommBackendDecl("toyring", "a:e")

        plugin = Plugin()
        """,
        group="atlas.hardware",
    )
    registry = discover()
    assert registry.hardware["toy"].backend == "a:b"
    assert registry.compute_targets["toyvendor"].target == "a:d"
    assert registry.comm_backends["toyring"].backend == "a:e"
    assert [item["key"] for item in record("toy-dist").as_json()["declares"]] == ["toyring", "toyvendor", "toy"]


def test_the_allow_list_keeps_others_from_being_imported(install):
    install("toy-dist", "raise SystemExit('imported')")
    install("toy-good", toy(key="good"), key="good")
    assert record("toy-dist", ["toy-good"]).status == "excluded"
    assert record("toy-good", ["Toy_Good"]).status == "ok"
    assert record("toy-good", ["good"]).status == "ok"
    core = [item for item in survey([]) if item.status != "excluded"]
    assert {item.dist for item in core} == {"atlas-core"}
    registry = discover(["toy-good"])
    with pytest.raises(PluginError, match="left out") as caught:
        registry.models.require("toy")
    assert "ATLAS_PLUGINS" in caught.value.cure
    with pytest.raises(PluginError, match="'toy-goood'"):
        survey(["toy-goood"])


def test_what_is_not_installed_says_what_is(install):
    install("toy-dist", toy())
    with pytest.raises(PluginError) as caught:
        discover(["toy-dist"]).models.require("Toyy")
    assert "'toyy'" in caught.value.what
    assert "did you mean 'toy'" in caught.value.why
    assert "atlas-model-toyy" in caught.value.cure


def test_lookup_accepts_any_spelling_and_aliases(install):
    install("toy-dist", toy(key="toy_1_5", aliases=("toy_moe",)), key="toy_1_5")
    models = discover().models
    assert models.require("Toy-1.5") is models["toy_moe"]


def test_hook_calls_and_tracebacks_are_traced(install):
    install("toy-dist", toy())
    install("toy-bad", "1 / 0", key="bad")
    lines: list[str] = []
    survey(["toy-dist", "toy-bad"], lines.append)
    told = [line for line in lines if line.startswith("toy-dist")]
    assert told[0] == "toy-dist:toy: asking atlas_model_weight_loader"
    assert told[1].startswith("toy-dist:toy: atlas_model_weight_loader gave [ModelDecl(model_type='toy'")
    assert any("ZeroDivisionError" in line and "toy_bad.py" in line for line in lines)


def test_records_are_sorted_whatever_the_order_of_installation(install):
    install("toy-b", toy(key="b"), key="b")
    install("toy-a", toy(key="a"), key="a")
    keys = [item.key for item in survey() if item.dist.startswith("toy")]
    assert keys == ["a", "b"]


def test_a_damaged_distribution_is_a_broken_record(install, tmp_path):
    install("toy-dist", toy())
    (tmp_path / "toy_dist-1.0.dist-info" / "METADATA").unlink()
    (found,) = [item for item in survey() if item.entry_point == "toy_dist:plugin"]
    assert (found.status, found.dist) == ("broken", "(the distribution of toy_dist)")
    assert "metadata" in found.reason


def test_an_object_may_be_named_twice(install):
    """One entry point must not be able to break the other, as registering one object twice would."""
    install("toy-dist", toy())
    install("toy-copy", "from toy_dist import plugin", key="copy")
    assert record("toy-dist").status == "ok"
    assert "declares 'toy'" in record("toy-copy").reason


@pytest.mark.parametrize(
    ("api", "host", "sound"),
    [("1.0", "1.0", True), ("1.0", "1.4", True), ("1.5", "1.4", False), ("0.9", "1.4", False), ("1.10", "1.9", False)],
)
def test_api_versions(api, host, sound):
    assert (compatible(api, host) == "") is sound


def test_an_empty_registry_has_no_keys():
    registry = Registry.of(())
    assert len(registry.hardware) == 0
    with pytest.raises(PluginError, match="installed: none"):
        registry.hardware.require("cpu")
