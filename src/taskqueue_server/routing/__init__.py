"""The operation table: routes, bodies, parameters, OpenAPI."""
