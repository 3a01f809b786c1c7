"""What every route needs of HTTP: sockets, TLS, limits, API keys, tenants, tracing, errors.

connections   connection, connection_limits, strict_http, lingering, listening, tls, keep_alive
process       service_manager
every request  middleware, request_scope, access, origins, query, errors, error_forms
tenants       keys, key_watch, tenants, rate_limits
load          admission, places, body_budget, prompt_workers, wait_estimate, limit_makers
several front ends  peers
figures       timing_breakdown, tracing, recent_requests
"""
