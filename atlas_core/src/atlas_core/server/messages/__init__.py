"""``POST /v1/messages`` as Anthropic's SDKs and Claude Code speak it: a translation to and from the one internal turn."""
