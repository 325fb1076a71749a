"""Small random schemas in which every keyword meets every other, and small random values that may or may not satisfy them."""

NAMES = ("a", "b", "ab", "c")
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
KEYWORDS = (
    "type", "type", "enum", "const", "properties", "properties", "required", "additionalProperties", "patternProperties",
    "propertyNames", "minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems", "contains", "minLength",
    "maxLength", "pattern", "minimum", "maximum", "exclusiveMinimum", "multipleOf", "allOf", "anyOf", "oneOf", "not", "if",
    "dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems", "$ref",
)  # fmt: skip
LEAVES = (True, True, False, {}, {"type": "integer"}, {"type": "string"}, {"const": 1})


class Draw:
    """``rng`` is a random.Random."""

    def __init__(self, rng):
        self.rng = rng

    def value(self, depth=0):
        rng = self.rng
        kind = rng.randrange(8 if depth < 2 else 6)
        match kind:
            case 6:
                return [self.value(depth + 1) for _ in range(rng.randrange(3))]
            case 7:
                return {rng.choice(NAMES): self.value(depth + 1) for _ in range(rng.randrange(3))}
        plain = (None, True, False, rng.randrange(-2, 5), rng.choice((0.5, 2.5, 1.0)), rng.choice(("", "a", "ab", "b")))
        return plain[kind]

    def document(self):
        """A whole schema, with two definitions that it may refer to."""
        schema = self.schema()
        return {**(schema if isinstance(schema, dict) else {}), "$defs": {"x": self.schema(2), "y": self.schema(2)}}

    def schema(self, depth=0):
        if depth > 3 or self.rng.random() < 0.08:
            return self.rng.choice(LEAVES)
        found = {}
        for _ in range(self.rng.choice((1, 1, 2, 2, 3))):
            keyword = self.rng.choice(KEYWORDS)
            found[keyword] = self.keyword(keyword, depth + 1)
            if keyword == "if":
                found |= {"then": self.schema(depth + 1), "else": self.schema(depth + 1)}
        return found

    def keyword(self, keyword, depth):
        rng = self.rng
        match keyword:
            case "type":
                return rng.choice(TYPES) if rng.random() < 0.7 else rng.sample(TYPES, 2)
            case "enum":
                return [self.value() for _ in range(rng.randrange(1, 4))]
            case "const":
                return self.value()
            case "properties":
                return {name: self.schema(depth) for name in rng.sample(NAMES, rng.randrange(1, 3))}
            case "required":
                return rng.sample(NAMES, rng.randrange(3))
            case "patternProperties":
                return {rng.choice(("^a", "b$", "c")): self.schema(depth)}
            case "dependentRequired":
                return {rng.choice(NAMES): rng.sample(NAMES, rng.randrange(1, 3))}
            case "dependentSchemas":
                return {rng.choice(NAMES): self.schema(depth)}
            case "allOf" | "anyOf" | "oneOf" | "prefixItems":
                return [self.schema(depth) for _ in range(rng.randrange(1, 4))]
            case "pattern":
                return rng.choice(("^a", "b", "^[ab]{1,3}$"))
            case "multipleOf":
                return rng.choice((1, 2, 3, 0.5))
            case "$ref":
                return rng.choice(("#/$defs/x", "#/$defs/y", "#"))
        return rng.randrange(4) if keyword.startswith(("min", "max", "exclusive")) else self.schema(depth)
