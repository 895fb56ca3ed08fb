"""The security list of the project: for each item, the tests that prove it, or why there are none yet."""

from __future__ import annotations

_S = "server/test_"
_E = "dispatch/test_egress"
_C = "dispatch/test_callback"
ITEMS: dict[int, tuple[str, tuple[str, ...]]] = {
    1: (
        "Workers send a token in a header or the first frame; constant-time comparison; limits without a token",
        (
            f"{_S}access.py::TestSocket.test_a_good_token",
            f"{_S}access.py::TestSocket.test_a_bad_token_is_refused_before_the_handshake",
            f"{_S}access.py::TestSocket.test_a_token_in_the_address",
            f"{_S}access.py::TestSocket.test_strangers_do_not_keep_workers_out",
            f"{_S}access.py::TestSocket.test_strangers_may_not_stay",
            f"{_S}access_tokens.py::TestFinding.test_every_entry_is_compared",
            f"{_S}access_tokens.py::TestFinding.test_nothing_ends_the_comparison",
            "security/test_code.py::test_secrets_are_compared_in_constant_time",
            "cli/test_token.py::test_a_new_token",
        ),
    ),
    2: (
        "The verbs and keys of a token are checked at each subscribe, settlement and operation",
        (
            f"{_S}access_scopes.py::test_every_route_is_in_a_table",
            f"{_S}access_scopes.py::test_every_operation",
            f"{_S}access_scopes.py::test_lists_leave_out_what_is_anothers",
            f"{_S}access_scopes.py::test_settings_reach_into_no_other_queue",
            f"{_S}access_scopes.py::TestReceipts.test_of_another_key",
            f"{_S}access_scopes.py::TestReceipts.test_adopting_what_is_anothers",
            f"{_S}access.py::TestSocket.test_another_scope",
            f"{_S}access_usage.py::test_what_is_no_identity",
            f"{_S}metrics.py::TestWhoMaySee.test_a_token_sees_its_keys_only",
        ),
    ),
    3: (
        "Administration needs its own verb; without tokens loopback only; destructive operations are confirmed",
        (
            f"{_S}access_scopes.py::test_what_is_public",
            f"{_S}access.py::test_no_open_server_for_others",
            f"{_S}access.py::test_an_open_server_says_so",
            f"{_S}http_operators.py::*",
        ),
    ),
    4: (
        "The Origin header is checked",
        (
            f"{_S}access.py::TestSocket.test_origins",
            f"{_S}access.py::TestSocket.test_a_session_is_no_token_here",
            f"{_S}access_pages.py::TestOtherSites.test_doing_something",
            f"{_S}access_pages.py::TestOtherSites.test_origins",
            f"{_S}abuse.py::TestHandshake.test_no_page_of_a_browser",
        ),
    ),
    5: (
        "TLS with verified certificates",
        (
            f"{_S}access_clients.py::TestTls.test_all_clients",
            f"{_S}access_clients.py::TestTls.test_bad_certificates",
            f"{_S}access_clients.py::TestTls.test_old_versions",
            "security/test_code.py::test_certificates_are_always_looked_at",
            f"{_E}_posting.py::TestTls.test_the_name",
            f"{_E}_posting.py::TestTls.test_bad_certificates",
            f"{_E}_posting.py::TestTls.test_unknown_authority",
            f"{_E}_posting.py::TestTls.test_old_versions",
            f"{_C}s.py::TestDelivered.test_tls",
            "redis/test_addresses.py::test_tls_is_verified_unless_disabled",
            "redis/test_checks.py::test_tls",
        ),
    ),
    6: (
        "Tokens can be rotated; a revocation closes open sockets within 10 s",
        (
            f"{_S}access_tokens.py::TestFinding.test_rotation",
            f"{_S}access_staying.py::TestStaying.test_revocation_ends_a_socket",
            f"{_S}access_staying.py::TestStaying.test_a_plugin_is_asked_again",
            f"{_S}access_staying.py::TestStaying.test_a_body_that_still_comes_is_not_taken",
            f"{_S}access_staying.py::TestStaying.test_a_file_that_could_not_be_read_is_read_again",
            f"{_S}access_tokens.py::TestFile.test_its_owner_keeps_it",
            f"{_S}access_scopes.py::test_who_waits_is_let_go_with_its_token",
            "cli/test_token.py::test_rotation",
        ),
    ),
    7: (
        "Callbacks go to public addresses only; this is checked at submission and again when they are sent",
        (
            f"{_E}.py::test_hosts",
            f"{_E}.py::test_other_forms",
            f"{_E}.py::test_other_ports",
            f"{_E}.py::test_plain_http",
            f"{_E}.py::test_exceptions",
            f"{_E}.py::test_submitted_and_called",
            f"{_E}_posting.py::TestRebinding.test_only_what_was_checked",
            f"{_E}_posting.py::TestRebinding.test_the_system_is_not_asked",
            f"{_E}_posting.py::TestRebinding.test_names_share_no_connection",
            f"{_E}_posting.py::TestRude.test_elsewhere",
            f"{_E}_posting.py::test_no_proxy",
            f"{_C}s.py::TestRefused.test_elsewhere",
            f"{_C}s.py::TestRefused.test_the_default_policy",
            f"{_C}s.py::TestRefused.test_a_flipping_name",
        ),
    ),
    8: (
        "The response of a callback receiver is not stored, except its status and length",
        (
            "dispatch/test_api_odd.py::test_answers_of_receivers_are_never_echoed",
            f"{_C}s_many.py::test_an_error_in_the_sender",
            f"{_E}_posting.py::TestRude.test_no_answer",
        ),
    ),
    9: (
        "Webhooks are signed as Standard Webhooks requires, with each secret of a rotation, and are limited",
        (
            f"{_C}_signing.py::*",
            f"{_C}s.py::TestDelivered.test_signed_and_recorded",
            f"{_C}s.py::TestRefused.test_and_taken_later",
            f"{_C}s.py::TestRefused.test_gone",
            f"{_C}s.py::TestRefused.test_throttled",
            f"{_C}_tasks.py::test_ids",
            f"{_C}_tasks.py::test_large_results",
            f"{_C}_tasks.py::test_odd_results",
            "dispatch/test_killed.py::test_killed_after_a_callback",
        ),
    ),
    10: (
        "Data is never executed as code",
        (
            "security/test_code.py::test_nothing_turns_data_into_code",
            "dev/test_checks.py::test_what_turns_data_into_code_is_found",
        ),
    ),
    11: (
        "Handlers are found through a registry",
        (
            "security/test_code.py::test_nothing_is_imported_by_a_name_of_the_wire",
            "security/test_code.py::test_handlers_come_from_the_registry",
        ),
    ),
    12: (
        "Each limit is tested at n and n + 1",
        (
            "core/test_limits.py::test_each_limit_is_exact",
            "core/test_limits.py::test_depth_is_counted_exactly",
            f"{_S}access_tokens.py::TestFile.test_limits",
            f"{_S}http_wire.py::test_malformed_requests",
            f"{_S}abuse.py::TestHandshake.test_connections_are_limited",
            f"{_S}access_usage.py::TestRate.test_exactly",
            f"{_S}access_usage.py::TestSockets.test_exactly",
        ),
    ),
    13: ("Nothing is decompressed", (f"{_S}abuse.py::TestHandshake.test_nothing_is_compressed",)),
    14: (
        "No regular expressions from outside; those of the project take linear time",
        ("core/test_limits.py::test_checks_take_linear_time",),
    ),
    15: (
        "Secrets appear in no output",
        (
            "security/test_canaries.py::test_nothing_comes_out",
            "security/test_canaries.py::test_addresses",
            f"{_S}logs.py::TestAccess.test_canaries",
            f"{_S}logs.py::TestJson.test_no_value_forges_a_line",
            "redis/test_addresses.py::test_secrets_do_not_show",
            "redis/test_checks.py::test_no_secret_is_among_the_facts",
        ),
    ),
    16: (
        "The number of metric labels is bounded",
        (
            f"{_S}metrics.py::TestBounds.test_many_queues",
            f"{_S}metrics.py::TestWhoMaySee.test_labels_hold_no_names_of_strangers",
        ),
    ),
    17: (
        "The access list for Redis that is shipped",
        (
            "redis/test_checks.py::test_the_access_list_that_ships",
            "redis/test_checks.py::test_the_access_list_suffices",
            "redis/test_checks.py::test_every_missing_right_is_named",
        ),
    ),
    18: (
        "Redis is never exposed to the network",
        (
            "redis/test_addresses.py::test_exposed_servers_are_refused",
            "redis/test_addresses.py::test_servers_that_are_found_later_are_refused_too",
        ),
    ),
    19: (
        "Names cannot change the structure of Redis keys",
        (
            "core/test_limits.py::test_names_are_plain",
            "redis/test_scripts.py::test_keys_are_built_from_the_partition",
            "redis/test_scripts.py::test_scripts_keep_to_their_partition",
        ),
    ),
    20: ("Lua is static", ("security/test_code.py::test_scripts_are_files",)),
    21: (
        "Receipts cannot be guessed, and are bound to the worker that received them",
        (
            f"{_S}access_scopes.py::TestReceipts.test_of_another_key",
            f"{_S}access_scopes.py::TestReceipts.test_adopting_from_another_server",
            "redis/test_receipts.py::test_receipts_that_were_never_issued",
        ),
    ),
    22: (
        "One client cannot starve the others: limits per name on rate, sockets, credit and keys; limits per tenant",
        (
            f"{_S}access_usage.py::TestRate.test_names_are_distinguished",
            f"{_S}access_usage.py::TestRate.test_batches_at_the_same_time",
            f"{_S}access_usage.py::TestRate.test_memory_is_bounded",
            f"{_S}access_usage.py::TestServer.test_requests",
            f"{_S}access_usage.py::TestServer.test_tasks_of_a_batch",
            f"{_S}access_usage.py::TestServer.test_sockets",
            f"{_S}access_usage.py::TestServer.test_sockets_of_prefect",
            f"{_S}access_usage.py::TestServer.test_who_says_nothing_has_a_place",
            f"{_S}access_usage.py::TestServer.test_a_plugin_gives_limits",
            "cli/test_token.py::test_limits",
            f"{_S}hostile.py::test_sockets_that_say_nothing",
            f"{_S}access.py::TestSocket.test_strangers_do_not_keep_workers_out",
            f"{_S}abuse.py::TestSlowReaders.test_one_that_never_reads_is_dropped",
            f"{_C}s_many.py::TestMany.test_hosts_in_turn",
        ),
    ),
    23: (
        "There are few dependencies, with bounds and a lock file",
        (
            "security/test_code.py::test_the_supply",
            "dev/test_checks.py::test_the_lock_is_pure_and_fits",
        ),
    ),
    24: (
        "Secrets come from the environment or a file, and appear in no repr",
        (
            f"{_S}access_tokens.py::TestFinding.test_reprs",
            f"{_C}_signing.py::test_what_is_no_secret",
            f"{_C}_signing.py::test_secrets_stay_inside",
            "security/test_canaries.py::test_addresses",
            "redis/test_addresses.py::test_a_password_file_is_read_each_time",
        ),
    ),
    25: (
        "Errors have codes, and contain neither tracebacks nor input",
        (
            "security/test_canaries.py::test_nothing_comes_out",
            f"{_S}access_scopes.py::test_details_of_the_store_are_for_those_with_a_token",
            f"{_S}access_tokens.py::TestFile.test_wrong_entries",
            "core/test_limits.py::test_no_error_shows_the_value",
        ),
    ),
    26: (
        "Only their owner can read sensitive files",
        (
            "cli/test_token.py::test_only_for_its_owner",
            f"{_S}access_tokens.py::TestFile.test_others_may_not_use_it",
            "redis/test_embedded_start.py::test_directory_that_others_can_write_is_refused",
        ),
    ),
    27: (
        "Spark code unpickles nothing and reads with a schema",
        (
            "security/test_code.py::test_nothing_turns_data_into_code",
            "spark/test_lines.py::*",
        ),
    ),
    28: ("The policy", ("security/test_code.py::test_the_policy",)),
}
LATER: dict[int, str] = {}
