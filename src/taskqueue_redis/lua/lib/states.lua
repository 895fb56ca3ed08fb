-- The fields of a task's record, which has 49 bytes.
local WAITING, SCHEDULED, DONE, DEAD, EXPIRED, CANCELLED, DISCARDED = 1, 2, 3, 4, 5, 6, 7
local REPLACED = 8 -- no task: remembers the id of a publish whose contents the task has got whose id is the ordering key
local BLOCKED = 9
local NOWHERE, FRESH, AGAIN, PARKED = 0, 1, 2, 3 -- where the body is: nowhere, a stream, the stream of redelivered entries, the hash
local HELD = 4 -- the body is in the hash, and the task waits for its ordering key
local ACK, REDELIVER, LOST, BURY, RETRY = 1, 2, 3, 4, 5
local RECORD, RECORD_SIZE = '>BBBHHHHI7I7I7c8BBI7', 49
