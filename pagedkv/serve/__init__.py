"""An HTTP server in OpenAI's form over an EngineClient: routes, answers as JSON or as server-sent events, metrics.

It needs the packages of the extra `serve`. docs/serving.md is for those who start it.
"""
