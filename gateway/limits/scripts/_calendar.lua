-- Days since 1970 and months of UTC. Redis's clock decides them, because gateways have several.

local DAY_MS = 86400000

-- The month of a day since 1970 as YYYYMM. Years start in March, so that a leap day is last.
local function month_of(number)
  local floor = math.floor
  local days = number + 719468
  local left = days % 146097
  local year = floor((left - floor(left / 1460) + floor(left / 36524) - floor(left / 146096)) / 365)
  local of_year = left - 365 * year - floor(year / 4) + floor(year / 100)
  local month = floor((5 * of_year + 2) / 153)
  year = year + 400 * floor(days / 146097)
  return month < 10 and year * 100 + month + 3 or (year + 1) * 100 + month - 9
end

-- The first day of the next month.
local function next_month(day)
  local month = month_of(day)
  repeat day = day + 1 until month_of(day) ~= month
  return day
end
