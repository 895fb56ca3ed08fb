"""Routes, bodies and parameters of operations, and the OpenAPI document made from them."""
