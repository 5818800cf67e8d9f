"""What Redis runs for the coordinator: one Lua program over one hash, each call of it atomic.

The hash is the whole table, so that eviction, a flush or a restart takes all of it or nothing:

===============  ==================================================================================
``g``            the generation, in hexadecimal
``run``          the life of the server in which it was made: ``run_id:master_replid``
``n``            how many slots the table has
``s``            the number of the last complete change
``until``        microseconds of Redis' clock before which no change may begin
``serial``       the serial number of the last mark
``marks``        the serial numbers of the marks that are there, divided by commas
``m<serial>``    a mark: when its owner is looked for, in microseconds, and its slots
``o<serial>``    its owner, if it has one
``c<number>``    the slots of a change, of the last :data:`CHANGES` changes
``changes`` …    counts for ``statistics``
``<slot>``       the number of its last change; below zero: so many changes of it are under way
===============  ==================================================================================

A generation counts only in the life of the server in which it was made. A server that was started
anew, or made master, may have loaded numbers from before the last change; its first writer makes a
new generation. So does the first one after the key was lost.

Processes with other tags or slots have a key of another name; all names are in one more key. A
change takes the others' keys away, before and after it is committed, so that they begin anew.

A new generation begins with a mark of everything, which lasts until ``until``: a change that was
marked in an older one may commit meanwhile, and what was read before that must not stand.
"""

from __future__ import annotations

import hashlib

#: Changes whose slots are kept for mirrors; one that is further behind starts anew.
CHANGES = 4096

#: Changes that can be under way at once; one more is refused until one ends.
MARKS = 256

#: The serial number of the mark with which a generation begins; no change has it.
FIRST_MARK = 0

# Every write of a script comes after one that Redis refuses when it has no memory left (HSET or
# HINCRBY), so that it is refused whole. INFO and TIME may be called before a write since Redis 5.
_PROGRAM = """
local key, deed, fresh, count = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local settle, life = tonumber(ARGV[4]), tonumber(ARGV[5])
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

local head = redis.call('HMGET', key, 'run', 'g', 'n', 's', 'until', 'marks')
local limit, until_ = tonumber(head[3] or ''), tonumber(head[5] or '')
if head[1] ~= run or not (head[2] and limit and tonumber(head[4] or '') and until_) then
  until_ = now + settle
  redis.call('DEL', key)
  redis.call('HSET', key, 'run', run, 'g', fresh, 'n', count, 's', '1', 'until', text(until_),
    'serial', '0', 'marks', '0', 'm0', text(until_) .. ':0', '0', '-1')
  local digests = redis.call('HGET', KEYS[2], 'digests') or ''
  if not string.find(digests, digest, 1, true) then
    redis.call('HSET', KEYS[2], 'digests', digests .. ' ' .. digest)
  end
  head = {run, fresh, count, '1', text(until_), '0'}
  limit = tonumber(count)
elseif until_ > now + settle then  -- the clock was set back
  until_ = now + settle
  redis.call('HSET', key, 'until', text(until_))
end
local generation, marks = head[2], list(head[6])

local function answer(...)
  local s = redis.call('HGET', key, 's')
  return {generation, text(limit), s, text(math.max(0, until_ - now)), ...}
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
  for other in string.gmatch(redis.call('HGET', KEYS[2], 'digests') or '', '%x+') do
    if other ~= digest then
      redis.call('DEL', string.sub(key, 1, -1 - #digest) .. other)
      redis.call('HSET', KEYS[2], 'digests', digest)
    end
  end
end

-- Give slots the next number; those of other marks stay under way.
local function complete(slots, marked)
  local s = redis.call('HINCRBY', key, 's', 1)
  local number, values, set = text(s), redis.call('HMGET', key, unpack(slots)), {}
  for index, slot in ipairs(slots) do
    local value = tonumber(values[index] or '0') or 0
    if value < 0 and marked then value = value + 1 end
    set[#set + 1] = slot
    set[#set + 1] = value < 0 and text(value) or number
  end
  redis.call('HSET', key, 'c' .. number, table.concat(slots, ','), unpack(set))
  redis.call('HDEL', key, 'c' .. text(s - CHANGES))
end

-- Complete the first mark when its time has come, and those that were settled; find the old ones.
local function recover(settled)
  local found, old, wanted = 0, {}, {}
  for _, serial in ipairs(settled) do wanted[serial] = true end
  for _, serial in ipairs(marks) do
    local deadline, line = string.match(redis.call('HGET', key, 'm' .. serial) or '', '(%d+):(.*)')
    if not deadline or tonumber(deadline) <= now then
      if not deadline or serial == 'FIRST' or wanted[serial] then
        complete(deadline and list(line) or {'0'}, true)
        drop(serial)
        if serial ~= 'FIRST' then found = found + 1 end
      else
        old[#old + 1] = serial
        old[#old + 1] = redis.call('HGET', key, 'o' .. serial) or ''
        old[#old + 1] = text(now - tonumber(deadline) + life)
      end
    elseif tonumber(deadline) > now + math.max(life, settle) then  -- the clock was set back
      redis.call('HSET', key, 'm' .. serial, text(now + life) .. ':' .. line)
    end
  end
  if found > 0 then redis.call('HINCRBY', key, 'recovered', found) end
  return found, old
end

if deed == 'look' then
  return answer()
elseif deed == 'mark' then
  if until_ > now then return answer('0') end
  recover({})
  end_others()
  if #marks >= MARKS then return answer('-1') end
  local slots = known(list(ARGV[6]))
  local serial = text(redis.call('HINCRBY', key, 'serial', 1))
  local values, set = redis.call('HMGET', key, unpack(slots)), {}
  for index, slot in ipairs(slots) do
    set[#set + 1] = slot
    set[#set + 1] = text(math.min(0, tonumber(values[index] or '0') or 0) - 1)
  end
  marks[#marks + 1] = serial
  redis.call('HSET', key, 'marks', table.concat(marks, ','),
    'm' .. serial, text(now + life) .. ':' .. table.concat(slots, ','), unpack(set))
  if ARGV[7] ~= '' then redis.call('HSET', key, 'o' .. serial, ARGV[7]) end
  return answer(serial, table.concat(slots, ','))
elseif deed == 'stamp' then
  local slots, serial = list(ARGV[6]), ARGV[8]
  if ARGV[7] ~= generation then
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
  complete(known(list(ARGV[6])), false)
  redis.call('HINCRBY', key, ARGV[7], 1)
  end_others()
  return answer()
elseif deed == 'recover' then
  local found, old = recover(list(ARGV[6]))
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

PROGRAM = (
    _PROGRAM.replace("'FIRST'", f"'{FIRST_MARK}'")
    .replace("CHANGES", str(CHANGES))
    .replace("MARKS", str(MARKS))
    .encode()
)

#: By which Redis knows it once it has run it.
SHA1 = hashlib.sha1(PROGRAM, usedforsecurity=False).hexdigest()
