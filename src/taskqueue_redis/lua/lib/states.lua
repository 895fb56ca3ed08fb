-- The record of a task, its books in 49 bytes: what its fields say.
local WAITING, SCHEDULED, DONE, DEAD, EXPIRED, CANCELLED, DISCARDED = 1, 2, 3, 4, 5, 6, 7
local NOWHERE, FRESH, AGAIN, PARKED = 0, 1, 2, 3 -- where its body is: a stream, the stream of returned ones, the hash
local HELD = 4 -- its body is in the hash too, and it behind another with its ordering key
local ACK, REDELIVER, LOST, BURY, RETRY = 1, 2, 3, 4, 5
local RECORD, RECORD_SIZE = '>BBBHHHHI7I7I7c8BBI7', 49
