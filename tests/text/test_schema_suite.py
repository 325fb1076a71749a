"""The public suite of JSON Schema: what is accepted is enforced, and what is refused is told with keyword and place."""

import json
import random
from decimal import Decimal
from fractions import Fraction

import jsonschema
import numpy as np
import pytest
import schema_suite
from jsonschema import Draft202012Validator
from random_schemas import Draw
from schema_suite import compiled, groups, parts, section, tables, verdicts

from atlas_core.engine.grammar import Grammars
from atlas_core.vocab.errors import RequestError

EOS = 256
CLOSERS = frozenset(b'"}],:0123 \n') | {EOS}
SAMPLES = 8


class Bytes:
    special_ids = frozenset({EOS})
    vocab_size = 257

    def token_bytes(self, token):
        return bytes([token]) if token < 256 else b"<eos>"

    def encode(self, text, **options):
        return list(text.encode())


@pytest.fixture(scope="module")
def start():
    grammars = Grammars(Bytes(), (EOS,), 257)
    yield lambda grammar: grammars._matcher(grammar, frozenset())
    grammars.close()


def multiple_of(validator, step, instance, schema):
    """Exactly: the validator's own divides binary floats."""
    if validator.is_type(instance, "number") and not _is_multiple(Decimal(str(instance)), Decimal(str(step))):
        yield jsonschema.ValidationError(f"{instance} is no multiple of {step}")


def _is_multiple(number, step):
    if abs(number.adjusted()) > 400:  # as a fraction it would fill the memory
        return number == 0 or number.adjusted() > 400
    return Fraction(number) % Fraction(step) == 0


Validator = jsonschema.validators.extend(Draft202012Validator, {"multipleOf": multiple_of})


def exact(value):
    """``value`` with exact decimals, and without a class of characters that only the compiler knows."""
    return json.loads(json.dumps(value).replace(r"\\p{Letter}", r"[^\\W\\d_]"), parse_float=Decimal)


def accepted():
    return [(*group, verdict) for group, verdict in zip(groups(), verdicts(), strict=True) if isinstance(verdict, str)]


def sample(matcher, rng, limit=240):
    """An answer that ended by itself, chosen at random among allowed bytes; None when it was cut."""
    row, out = np.zeros(9, np.uint32), bytearray()
    while not matcher.done and len(out) < limit:
        matcher.fill(row)
        assert not matcher.failure
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:257]).tolist()
        closing = [token for token in allowed if token in CLOSERS]
        token = rng.choice(closing if closing and rng.random() < 0.35 else allowed)
        if EOS in allowed and rng.random() < 0.5:
            token = EOS
        if token == EOS:
            return bytes(out)
        matcher.accept(token)
        out.append(token)
    return bytes(out) if matcher.done else None


def follows(matcher, text):
    row = np.zeros(9, np.uint32)
    for byte in text.encode():
        if not matcher.allows(byte):
            return False
        matcher.accept(byte)
    matcher.fill(row)
    return matcher.done or bool(row[EOS // 32] >> (EOS % 32) & 1)


def test_most_schemas_are_accepted():
    assert len(accepted()) >= 0.78 * len(groups())


def test_refusals_name_keyword_and_place():
    for (_, _, schema, _), verdict in zip(groups(), verdicts(), strict=True):
        if isinstance(verdict, RequestError):
            keyword, place = parts(verdict)
            assert verdict.field == "f"
            assert verdict.why
            assert keyword or place == "#" or schema is False, verdict
            assert not keyword or place.startswith("#/")


def test_no_invalid_instance_gets_through(start):
    valid = passed = 0
    for file, description, schema, tests, grammar in accepted():
        for test in tests:
            texts = [json.dumps(test["data"]), json.dumps(test["data"], ensure_ascii=False, separators=(",", ":"))]
            good = any(follows(start(grammar), text) for text in texts)
            assert test["valid"] or not good, (file, description, test, schema)
            valid += test["valid"]
            passed += test["valid"] and good
    # The others have members in another order, 1.0 for 1, or text that is not of its format.
    assert passed >= 0.94 * valid


def test_samples_validate(start):
    whole = 0
    for file, description, schema, _, grammar in accepted():
        rng = random.Random(file + description)
        validator = Validator(exact(schema))
        for _ in range(SAMPLES):
            text = sample(start(grammar), rng)
            if text is not None:
                whole += 1
                instance = json.loads(text, parse_float=Decimal)
                problems = [problem.message for problem in validator.iter_errors(instance)]
                assert not problems, (file, description, text, schema)
    assert whole >= 0.9 * SAMPLES * len(accepted())


def test_the_page_says_what_the_code_says():
    page = schema_suite.PAGE.read_text()
    for name, said in tables().items():
        assert section(page, name) == said, "run python tests/text/schema_suite.py"


@pytest.mark.parametrize("seed", range(4))
def test_random_schemas_are_enforced_or_refused(start, seed):
    """In all combinations of keywords: samples validate, and values that do not satisfy a schema do not follow its grammar."""
    draw = Draw(random.Random(seed))
    accepted = whole = missed = 0
    for _ in range(100):
        schema = draw.document()
        try:
            grammar = compiled(schema)
        except RequestError as error:
            assert error.why
            continue
        accepted += 1
        validator = Validator(exact(schema))
        texts = [sample(start(grammar), draw.rng, 120) for _ in range(2)]
        for text in filter(None, texts):
            whole += 1
            assert validator.is_valid(json.loads(text, parse_float=Decimal)), (text, schema)
        for _ in range(5):
            value = draw.value()
            good = follows(start(grammar), json.dumps(value))
            valid = validator.is_valid(exact(value))
            assert valid or not good, (value, schema)
            missed += valid and not good
    assert accepted > 50
    assert whole > 100
    assert missed <= 0.02 * 5 * accepted, "members in another order, 1.0 for 1"


OPEN = {"properties": {"a": {"type": "null"}}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # Names of members spelt with escapes would get around the schema that their name has.
        (OPEN, [r'{"a":null}', r'{"b":1}', r'{"b\"\\":1}'], [r'{"\u0061":1}', r'{"a":1}', r'{"b":1,"a":1}', r'{"a":null,"a":1}']),
        ({"patternProperties": {"^a": {"type": "null"}}}, [r'{"ab":null,"b":1}'], [r'{"\u0061b":1}', r'{"ab":1}']),
        ({"type": "integer", "not": {"enum": [3, 5]}}, ["2", "4", "6"], ["3", "5", "3.5"]),
        ({"type": "string", "not": {"enum": ["ab", "a", "x.y"]}}, ['"b"', '""', '"abc"', '"x,y"'], ['"ab"', '"a"', '"x.y"']),
        ({"not": {"const": [1, "a"]}}, ["[1]", '[1,"b"]', '[1,"a",2]', "null"], ['[1,"a"]']),
        ({"not": {"const": {"k": 1}}}, ["{}", '{"k":2}', '{"k":1,"l":1}', "[]"], ['{"k":1}']),
        ({"minProperties": 2, "additionalProperties": False, "properties": {"a": {}, "b": {}, "c": {}}}, ['{"a":1,"c":1}'], ['{"b":1}', '{"b":1,"b":1}']),
        ({"maxProperties": 1, "properties": {"a": {}}}, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}']),
        ({"contains": {"const": 1}, "maxItems": 2, "items": {"type": "integer"}}, ["[1]", "[2,1]", "[1,3]"], ["[]", "[2]", "[2,2]", "[2,2,1]"]),
        ({"contains": {"const": 1}, "maxItems": 3, "maxContains": 1}, ["[1]", "[2,1]"], ["[1,1]", "[2,2]"]),
        ({"allOf": [{"multipleOf": 4}, {"multipleOf": 6}], "type": "integer"}, ["12", "0", "-24"], ["4", "6", "8"]),
        ({"if": {"properties": {"k": {"const": 1}}, "required": ["k"]}, "then": {"required": ["l"]}, "type": "object"},
         ['{"k":1,"l":0}', '{"k":2}', "{}"], ['{"k":1}']),
        ({"properties": {"a": False, "b": {}}}, ['{"b":1}'], ['{"a":1}']),
        ({"propertyNames": {"maxLength": 2}, "type": "object"}, ['{"ab":1}', '{"é😀":1}'], ['{"abc":1}']),
        ({"$ref": "#/$defs/N", "$defs": {"N": {"anyOf": [{"type": "null"}, {"type": "object", "required": ["n"], "properties": {"n": {"$ref": "#/$defs/N"}}}]}}},
         ["null", '{"n":{"n":null}}'], ['{"n":1}', "{}"]),
    ],
)  # fmt: skip
def test_what_is_rewritten_is_the_same(start, schema, good, bad):
    grammar = compiled(schema)
    assert [text for text in good if not follows(start(grammar), text)] == []
    assert [text for text in bad if follows(start(grammar), text)] == []


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "object", "minProperties": 2}, "may repeat"),
        ({"const": "\x07"}, "control characters"),
        ({"multipleOf": 99991, "type": "integer"}, "steps"),
        ({"items": [{"multipleOf": 9973}, {"multipleOf": 9967}, {"multipleOf": 9949}]}, "neither an object"),
        ({"prefixItems": [{"type": "integer", "multipleOf": number} for number in (9973, 9967, 9949)]}, "steps"),
        ({"minimum": 10**4000}, "not below"),
        ({"enum": [1, 10**4000]}, "not below"),
        ({"allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(30)]}, "regular expressions meet"),
        # Whether both can hold cannot be told, and then they are not taken to exclude one another.
        ({"patternProperties": {"a.{200}b": {"type": "null"}, "b.{201}a": {"type": "integer"}}}, "cannot be compared"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "no value"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}, "no value"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "itself"),
        ({"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"const": 1}}} for j in range(10)]} for i in range(4)]}, "alternatives"),
        ({"allOf": [{"properties": {f"p{i}{j}": {} for j in range(40)}, "patternProperties": {f"^{i}{j}": {} for j in range(40)}} for i in range(9)]},
         "regular expressions"),
    ],
)  # fmt: skip
def test_what_would_not_hold_or_not_end_is_refused(schema, words):
    with pytest.raises(RequestError) as caught:
        compiled(schema)
    assert words in caught.value.why
