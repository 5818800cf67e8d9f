-- What wrk does beside sending: wrk.py writes `settings` and dofile()s this.

local threads = {}

-- Another request each time.
if settings.vary then
  local number = 0
  request = function()
    number = number + 1
    return wrk.format(nil, wrk.path .. settings.vary .. number)
  end
end

-- Its one thread notes each answer: 503 with Retry-After is "refused", any other failure its status.
-- Where there is a function `response`, wrk is slower.
if settings.statuses then
  function setup(thread) table.insert(threads, thread) end
  function init(args) kinds = {} end
  function response(status, headers, body)
    if status < 400 then return end
    local kind = "status_" .. status
    if status == 503 then
      for name, _ in pairs(headers) do
        if name:lower() == "retry-after" then kind = "refused" end
      end
    end
    kinds[kind] = (kinds[kind] or 0) + 1
  end
end

-- wrk sleeps for its whole time unless it is interrupted; then it tells what there was until then.
if settings.most then
  local ffi, interrupt = require("ffi"), 2
  ffi.cdef("int getpid(void); int kill(int, int);")
  function init(args) left = settings.most end
  function response(status)
    if status >= 400 then return end
    left = left - 1
    if left == 0 then
      wrk.thread:stop()
      ffi.C.kill(ffi.C.getpid(), interrupt)
    end
  end
end

-- How many answers took how long. wrk finds one of its values by walking from the first
-- microsecond, so where an overload has left many, and long ones, printing all takes it minutes;
-- then it is asked for each half percent of the answers.
function print_latencies(latency, answers)
  local function line(microseconds, count)
    io.write(string.format("latency %d %d\n", microseconds, count))
  end
  if #latency * latency.max < 1e9 then
    for index = 1, #latency do line(latency(index)) end
    return
  end
  local before = 0
  for step = 1, 200 do
    local until_here = math.ceil(answers * step / 200)
    -- of 100 percent wrk knows none
    line(step < 200 and latency:percentile(step / 2) or latency.max, until_here - before)
    before = until_here
  end
end

function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format("summary %d %d %d\n", summary.requests, summary.duration, e.status))
  for _, kind in ipairs({"connect", "read", "write", "timeout"}) do
    io.write(string.format("failed %s %d\n", kind, e[kind]))
  end
  for _, thread in ipairs(threads) do
    for kind, count in pairs(thread:get("kinds")) do
      io.write(string.format("answered %s %d\n", kind, count))
    end
  end
  print_latencies(latency, summary.requests)
end
