"""Who used how many tokens: counters by tenant for /metrics, and a ledger that outlives the server for bills.

tokens      what one request used, and the counters
ledger      the SQLite file: one row a day, tenant, key and model
forms       rows as JSON and CSV, dates as they are asked for

GET /v1/usage is in `api.openai.usage_routes`, `quire usage` in `quire.cli.usage`.
"""
