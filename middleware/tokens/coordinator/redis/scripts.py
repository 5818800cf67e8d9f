"""The Lua programs that Redis runs for the coordinator.

:data:`TABLE` works on one hash and a list of such hashes.

Each call of it is atomic. The hash is the whole table, so that eviction, a flush or a restart
removes all of it or nothing:

===============  ==================================================================================
``head``         divided by blanks: the life of the server in which it was made
                 (``run_id:master_replid``), the generation in hexadecimal, how many slots there
                 are, the number of the last complete change, and a random name that tells it from
                 others that might have had its number
``until``        microseconds of Redis' clock before which no change may begin
``last``         the time of the last look at the table before that, by the same clock
``serial``       the serial number of the last mark
``marks``        the serial numbers of the marks that are there, divided by commas
``m<serial>``    a mark: the time from which on its owner is looked for, in microseconds, and its
                 slots
``o<serial>``    its owner, if it has one
``c<number>``    the slots and the name of a change, for the last :data:`CHANGES` changes
``changes`` …    counts for ``statistics``
``<slot>``       the number of its last change; below zero: so many changes of it are under way
===============  ==================================================================================

A generation counts only in the life of the server in which it was made. A server that was started
anew, or made master, may have loaded numbers from before the last change; its first writer makes a
new generation. So does the first one after the key was lost, and one that does not find the last
change that it knows of.

Processes with other tags or slots have a key of another name; all names are in one more key, and a
table that is not named there does not count, not even for readers. A change removes the keys and
names of other versions, before and after it is committed, so that those start anew.

A new generation begins with a mark of everything: a change that was marked in an older one may
still commit, and answers from before that must not stand. From ``until`` on, when nobody trusts an
older generation any more, that mark is checked as other old marks are, and completed when no
transaction from before is under way in the database. The clock may be set before ``until``. So of
the time between two looks at the table :data:`STEP_SECONDS` count at most.
"""

from __future__ import annotations

import hashlib

#: Changes whose slots are kept for mirrors; one that is further behind starts anew.
CHANGES = 4096

#: Changes that can be under way at once; one more is refused until one ends.
MARKS = 256

#: The serial number of the mark with which a generation begins; no change has it.
FIRST_MARK = 0

#: Seconds that count at most between two looks at a new generation: its wait is shorter by no more
#: when the server's clock is set forward meanwhile.
STEP_SECONDS = 0.25

# Every write of a script comes after one that Redis refuses when it has no memory left (HSET or
# HINCRBY), so that it is refused whole. INFO and TIME may be called before a write since Redis 5.
_TABLE = """
local key, deed, fresh, count = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local settle, life = tonumber(ARGV[4]), tonumber(ARGV[5])
local known_generation, known_s, known_change = string.match(ARGV[6], '^(%x+) (%d+) (%x+)$')
local digest = string.match(key, '%x+$')

local replication = redis.call('INFO', 'replication')
if not string.find(replication, 'role:master', 1, true) then
  return redis.error_reply('READONLY this server is a replica')
end
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
  .. ':' .. string.match(replication, 'master_replid:(%x+)')
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])

local function text(number) return string.format('%.0f', number) end

local function list(line)
  local found = {}
  for number in string.gmatch(line or '', '%d+') do found[#found + 1] = number end
  return found
end

local function tells(line) return string.match(line or '', ':(%x+)$') end

-- Whether it lacks the last change that the caller knows of.
local function went_back(generation, s)
  if known_generation ~= generation then return false end
  if s < tonumber(known_s) then return true end
  local change = tells(redis.call('HGET', key, 'c' .. known_s))
  local forgotten = s - tonumber(known_s) >= CHANGES
  return change ~= known_change and (change or not forgotten)
end

local fields = redis.call('HMGET', key, 'head', 'until', 'marks', 'last')
local until_, last = tonumber(fields[2] or ''), tonumber(fields[4] or '')
local life_, generation, limit, s, change =
  string.match(fields[1] or '', '^(%S+) (%x+) (%d+) (%d+) (%x+)$')
limit, s = tonumber(limit or ''), tonumber(s or '')
local function head()
  return table.concat({run, generation, text(limit), text(s), change}, ' ')
end
local marks, digests = list(fields[3]), redis.call('HGET', KEYS[2], 'digests') or ''
local named, back = string.find(digests, digest, 1, true), ''
if life_ == run and went_back(generation, s) then back = '-' end
if life_ ~= run or back ~= '' or s >= 2^53 or not (until_ and last and named) then
  generation, limit, s, change, marks = fresh, tonumber(count), 1, fresh, {'FIRST'}
  until_, last = now + settle, now
  redis.call('DEL', key)
  redis.call('HSET', key, 'head', head(), 'c1', '0:' .. fresh, 'until', text(until_),
    'last', text(last), 'serial', '0', 'marks', 'FIRST', 'm' .. 'FIRST', text(until_) .. ':0',
    '0', '-1')
  if not named then redis.call('HSET', KEYS[2], 'digests', digests .. ' ' .. digest) end
elseif until_ > last then
  -- Set forward the clock may not end the wait, nor make it longer, set back.
  local passed = now - last
  until_, last = until_ + passed - math.max(0, math.min(passed, STEP)), now
  redis.call('HSET', key, 'until', text(until_), 'last', text(last))
end

local function answer(...)
  local wait = until_ > last and until_ - now or 0
  return {generation, text(limit), text(s), text(wait), back .. change, ...}
end

local function known(slots)
  for _, slot in ipairs(slots) do
    if tonumber(slot) >= limit then return {'0'} end
  end
  return slots
end

local function drop(serial)
  local left = {}
  for _, other in ipairs(marks) do
    if other ~= serial then left[#left + 1] = other end
  end
  marks = left
  redis.call('HSET', key, 'marks', table.concat(marks, ','))
  redis.call('HDEL', key, 'm' .. serial, 'o' .. serial)
end

-- Take away the tables of processes that number slots otherwise.
local function end_others()
  for other in string.gmatch(digests, '%x+') do
    if other ~= digest then
      redis.call('DEL', string.sub(key, 1, -1 - #digest) .. other)
      redis.call('HSET', KEYS[2], 'digests', digest)
    end
  end
end

-- Give slots the next number; those of other marks stay under way.
local function complete(slots, marked)
  s, change = s + 1, fresh
  local number, values, set = text(s), redis.call('HMGET', key, unpack(slots)), {}
  for index, slot in ipairs(slots) do
    local value = tonumber(values[index] or '0') or 0
    if value < 0 and marked then value = value + 1 end
    set[#set + 1] = slot
    set[#set + 1] = value < 0 and text(value) or number
  end
  redis.call('HSET', key, 'head', head(), 'c' .. number, table.concat(slots, ',') .. ':' .. fresh,
    unpack(set))
  redis.call('HDEL', key, 'c' .. text(s - CHANGES))
end

-- Complete the marks that were settled; find the old ones, and in its time the first one.
local function recover(settled)
  local found, old, wanted = 0, {}, {}
  for _, serial in ipairs(settled) do wanted[serial] = true end
  for _, serial in ipairs(marks) do
    local deadline, line = string.match(redis.call('HGET', key, 'm' .. serial) or '', '(%d+):(.*)')
    if serial == 'FIRST' then
      if until_ <= last then
        if wanted[serial] then
          complete({'0'}, true)
          drop(serial)
        else
          old[#old + 1] = serial
          old[#old + 1] = ''
          old[#old + 1] = '0'
        end
      end
    elseif not deadline or tonumber(deadline) <= now then
      if not deadline or wanted[serial] then
        complete(deadline and list(line) or {'0'}, true)
        drop(serial)
        found = found + 1
      else
        old[#old + 1] = serial
        old[#old + 1] = redis.call('HGET', key, 'o' .. serial) or ''
        old[#old + 1] = text(now - tonumber(deadline) + life)
      end
    elseif tonumber(deadline) > now + life then  -- the clock was set back
      redis.call('HSET', key, 'm' .. serial, text(now + life) .. ':' .. line)
    end
  end
  if found > 0 then
    redis.call('HINCRBY', key, 'recovered', found)
    end_others()
  end
  return found, old
end

if deed == 'look' then
  return answer()
elseif deed == 'mark' then
  if until_ > last then return answer('0') end
  recover({})
  end_others()
  if #marks >= MARKS then return answer('-1') end
  local slots = known(list(ARGV[7]))
  local serial = text(redis.call('HINCRBY', key, 'serial', 1))
  local values, set = redis.call('HMGET', key, unpack(slots)), {}
  for index, slot in ipairs(slots) do
    set[#set + 1] = slot
    set[#set + 1] = text(math.min(0, tonumber(values[index] or '0') or 0) - 1)
  end
  marks[#marks + 1] = serial
  redis.call('HSET', key, 'marks', table.concat(marks, ','),
    'm' .. serial, text(now + life) .. ':' .. table.concat(slots, ','), unpack(set))
  if ARGV[8] ~= '' then redis.call('HSET', key, 'o' .. serial, ARGV[8]) end
  return answer(serial, table.concat(slots, ','))
elseif deed == 'stamp' then
  local slots, serial = list(ARGV[7]), ARGV[9]
  if ARGV[8] ~= generation then
    -- Its mark is in a table that is gone, with slots that may be others here.
    complete({'0'}, false)
  else
    local line = string.match(redis.call('HGET', key, 'm' .. serial) or '', ':(.*)')
    complete(line and list(line) or known(slots), line ~= nil)
    if line then drop(serial) end
  end
  redis.call('HINCRBY', key, 'changes', 1)
  end_others()
  return answer()
elseif deed == 'touch' then
  complete(known(list(ARGV[7])), false)
  redis.call('HINCRBY', key, ARGV[8], 1)
  end_others()
  return answer()
elseif deed == 'recover' then
  -- Settled was what another generation had by these numbers, if this is a new one.
  local found, old = recover(ARGV[8] == generation and list(ARGV[7]) or {})
  return answer(text(found), unpack(old))
elseif deed == 'count' then
  local under_way = 0
  for _, serial in ipairs(marks) do
    if serial ~= 'FIRST' then under_way = under_way + 1 end
  end
  local counts = redis.call('HMGET', key, 'changes', 'recovered', 'flushes')
  return answer(text(under_way), counts[1] or '0', counts[2] or '0', counts[3] or '0')
end
return redis.error_reply('ERR no deed of that name')
"""


class Program:
    """A program.

    :param text: its text, in Lua
    """

    def __init__(self, text: bytes) -> None:
        self.text = text
        #: The digest by which Redis finds it once it has run it.
        self.sha1 = hashlib.sha1(text, usedforsecurity=False).hexdigest()


TABLE = Program(
    _TABLE.replace("'FIRST'", f"'{FIRST_MARK}'")
    .replace("CHANGES", str(CHANGES))
    .replace("MARKS", str(MARKS))
    .replace("STEP", str(round(STEP_SECONDS * 1e6)))
    .encode()
)

#: Numbers that nodes tell each other and that are kept: as many as a node knows of.
TOLD = 1 << 15
#: Numbers that one call returns at most.
TOLD_AT_ONCE = 1000

# The hash has ``key``; ``begun``, the milliseconds when that was written; ``last``, how many
# numbers were told since; and each number with its milliseconds, in the fields 0 to TOLD - 1 in
# turn. Who finds no key keeps his own, so that one that was lost is back.
_EXCHANGE = """
local hash, key = KEYS[1], ARGV[1]
-- As the table's program does: an answer of a replica would end the outage that it has noted.
if not string.find(redis.call('INFO', 'replication'), 'role:master', 1, true) then
  return redis.error_reply('READONLY this server is a replica')
end
local time = redis.call('TIME')
local now = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
local kept = redis.call('HMGET', hash, 'key', 'begun', 'last')
if not (kept[1] and kept[2]) then
  redis.call('DEL', hash)
  redis.call('HSET', hash, 'key', key, 'begun', now)
  kept = {key, now, '0'}
end
local begun, last = kept[2], tonumber(kept[3] or '') or 0
if #ARGV > 2 and kept[1] == key then
  local set = {}
  for index = 3, #ARGV do
    set[#set + 1] = string.format('%.0f', last % TOLD)
    set[#set + 1] = ARGV[index] .. ' ' .. now
    last = last + 1
  end
  redis.call('HSET', hash, 'last', string.format('%.0f', last), unpack(set))
end
local its_begun, after = string.match(ARGV[2], '^(%d+) (%d+)$')
after = math.max(its_begun == begun and tonumber(after) or 0, last - TOLD)
local fields, upto = {}, math.min(last, after + AT_ONCE)
for number = after, upto - 1 do fields[#fields + 1] = string.format('%.0f', number % TOLD) end
local place = begun .. ' ' .. string.format('%.0f', upto)
local answer = {kept[1], now, place, upto < last and '1' or '0'}
if #fields > 0 then
  for _, value in ipairs(redis.call('HMGET', hash, unpack(fields))) do
    answer[#answer + 1] = value or ''
  end
end
return answer
"""

#: Lets nodes tell each other numbers, over a hash of its own; see :meth:`.Coordinator.exchange`.
EXCHANGE = Program(
    _EXCHANGE.replace("TOLD", str(TOLD)).replace("AT_ONCE", str(TOLD_AT_ONCE)).encode()
)
