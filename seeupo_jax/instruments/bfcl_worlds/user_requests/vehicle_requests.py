"""Requests to the car."""

from __future__ import annotations

from seeupo_jax.instruments.bfcl_worlds import world_words as words
from seeupo_jax.instruments.bfcl_worlds.draft import Draft, UserMessage, requests
from seeupo_jax.instruments.bfcl_worlds.scenarios import VEHICLE


def _address(draft: Draft) -> str:
    city = draft.choose([city for road in words.ROADS for city in road])
    return f"{draft.rng.randint(2, 180)} {draft.choose(words.STREETS)}, {city}"


def _doors(draft: Draft, state: str) -> list[str]:
    return [door for door, now in draft.simulator(VEHICLE).doorStatus.items() if now == state]


def _named(doors: list[str]) -> str:
    return " and ".join(door.replace("_", " ") for door in doors)


def refuel(draft: Draft) -> UserMessage:
    gallons = draft.amount(2, 20)
    draft.call("fillFuelTank", fuelAmount=gallons)
    return draft.phrase(
        "Put {gallons} gallons in the tank.",
        "The tank can take {gallons} gallons more; fill them in.",
        partial="Put a few gallons in the tank.",
        detail=("{gallons} of them.", "I would say {gallons}."),
        gallons=gallons,
    )


def refuel_liters(draft: Draft) -> UserMessage:
    liters = draft.amount(8, 60)
    gallons = draft.call("liter_to_gallon", liter=liters)["gallon"]
    draft.call("fillFuelTank", fuelAmount=gallons)
    return draft.phrase(
        "I paid for {liters} litres. How many gallons is that? Fill exactly those in.",
        "Convert {liters} litres to gallons and fill the tank with the result, not rounded.",
        partial="Convert the litres I paid for to gallons and fill in the result, not rounded.",
        detail="I paid for {liters} litres.",
        liters=liters,
    )


def fuel_in_liters(draft: Draft) -> UserMessage:
    fuel = draft.call("displayCarStatus", option="fuel")["fuelLevel"]
    draft.call("gallon_to_liter", gallon=fuel)
    return draft.phrase(
        "Look at the fuel level and express it in litres.",
        "How many litres are in the tank? The car only shows gallons.",
    )


def lock_up(draft: Draft) -> UserMessage:
    draft.call("lockDoors", unlock=False, door=_doors(draft, "unlocked"))
    return draft.phrase(
        "Lock whichever doors are still open.",
        "I am leaving the car, so all of its doors should be locked.",
    )


def unlock(draft: Draft) -> UserMessage:
    door = draft.choose(_doors(draft, "locked"))
    draft.call("lockDoors", unlock=True, door=[door])
    return draft.phrase(
        "Somebody wants to get in: unlock the {door} door only.",
        "Open the lock of the {door} door.",
        partial="Somebody wants to get in: unlock one door.",
        detail="The {door} door.",
        door=_named([door]),
    )


def start(draft: Draft) -> UserMessage:
    open_doors = _doors(draft, "unlocked")
    if open_doors:
        draft.call("lockDoors", unlock=False, door=open_doors)
    draft.call("pressBrakePedal", pedalPosition=1.0)
    draft.call("startEngine", ignitionMode="START")
    draft.set_fact("running", True)
    return draft.phrase(
        "Get the engine going. It wants locked doors and the brake pedal pressed all the way down.",
        "Let us drive: lock what is unlocked, brake fully, and turn the engine on.",
    )


def climate(draft: Draft) -> UserMessage:
    degrees, fan = draft.amount(17, 27), draft.rng.randint(1, 9) * 10
    mode = draft.choose(("cool", "heat", "defrost"))
    draft.call("adjustClimateControl", temperature=degrees, fanSpeed=fan, mode=mode)
    return draft.phrase(
        "Make it {degrees} degrees Celsius in here, fan at {fan}, mode '{mode}'.",
        "Climate: '{mode}', {degrees} degrees Celsius, and a fan speed of {fan}.",
        partial="Climate: '{mode}', with a fan speed of {fan}.",
        detail=("{degrees} degrees Celsius.", "I would like {degrees} degrees Celsius."),
        degrees=degrees,
        fan=fan,
        mode=mode,
    )


def headlights(draft: Draft) -> UserMessage:
    lit = draft.simulator(VEHICLE).headLightStatus == "on"
    draft.call("setHeadlights", mode="off" if lit else "on")
    return draft.phrase(
        "Headlights {mode}, please.",
        "It is {sky} outside, so switch the headlights {mode}.",
        mode="off" if lit else "on",
        sky="bright" if lit else "dark",
    )


def parking_brake(draft: Draft) -> UserMessage:
    engaged = draft.simulator(VEHICLE).parkingBrakeStatus == "engaged"
    draft.call("activateParkingBrake", mode="release" if engaged else "engage")
    return draft.phrase(
        "{word} the parking brake.",
        "{reason}; see to the parking brake accordingly.",
        word="Release" if engaged else "Engage",
        reason="We roll on" if engaged else "We stand on a slope and stay",
    )


def navigate(draft: Draft) -> UserMessage:
    place = _address(draft)
    draft.call("set_navigation", destination=place)
    return draft.phrase(
        "Take me to '{place}'.",
        "Point the navigation at '{place}'.",
        partial="Point the navigation at my aunt's house.",
        detail=("She lives at '{place}'.", "That is '{place}'."),
        place=place,
    )


def tire_shop(draft: Draft) -> UserMessage:
    shop = draft.call("find_nearest_tire_shop")["shopLocation"]
    draft.call("set_navigation", destination=shop)
    return draft.phrase(
        "Something is wrong with a wheel. Find the closest tire shop and guide me there.",
        "Look for a tire shop nearby and set it as the destination.",
    )


def tires(draft: Draft) -> UserMessage:
    draft.call("check_tire_pressure")
    return draft.phrase(
        "Are the tires all right? Read me their pressures.",
        "Check how much air is in the four tires.",
    )


def distance(draft: Draft) -> UserMessage:
    first, second = draft.choose(words.ROADS)
    codes = [draft.call("get_zipcode_based_on_city", city=city) for city in (first, second)]
    zips = [code["zipcode"] for code in codes]
    draft.call("estimate_distance", cityA=zips[0], cityB=zips[1])
    return draft.phrase(
        "How far is it from {first} to {second}? You will need both zip codes.",
        "Get the zip codes of {first} and {second} and estimate how far apart they are.",
        partial="How far is it from {first} to the next stop? You will need both zip codes.",
        detail="The next stop is {second}.",
        first=first,
        second=second,
    )


def feasible(draft: Draft) -> UserMessage:
    miles = draft.amount(60, 500)
    draft.call("estimate_drive_feasibility_by_mileage", distance=miles)
    return draft.phrase(
        "Does the fuel last for {miles} miles?",
        "Could we drive {miles} miles as we are?",
        partial="Does the fuel last for our tour?",
        detail="The tour has {miles} miles.",
        miles=miles,
    )


def status(draft: Draft) -> UserMessage:
    option, name = draft.choose(
        (
            *(("battery", "battery"), ("doors", "doors"), ("climate", "climate control")),
            *(("engine", "engine"), ("fuel", "fuel"), ("parkingBrake", "parking brake")),
        )
    )
    draft.call("displayCarStatus", option=option)
    return draft.phrase(
        "What does the car report about its {name}?",
        "Display the status of the {name}.",
        partial="Display the status of one part of the car.",
        detail="Of the {name}.",
        name=name,
    )


def brake(draft: Draft) -> UserMessage:
    position = draft.choose((0.2, 0.3, 0.4, 0.6, 0.7, 0.8))
    draft.call("pressBrakePedal", pedalPosition=position)
    return draft.phrase(
        "Press the brake pedal to position {position}.",
        "Brake a little: pedal at {position}, where 1 is all the way.",
        partial="Brake a little; I will say how far.",
        detail="Pedal at {position}.",
        position=position,
    )


def log(draft: Draft) -> UserMessage:
    text = words.sentence(draft.rng)
    draft.call("display_log", messages=[text])
    return draft.phrase(
        "Show '{text}' on the car's log.",
        "Let the log of the car display one message: '{text}'",
        partial="Let the log of the car display one message.",
        detail="The message is '{text}'",
        text=text,
    )


def cruise(draft: Draft) -> UserMessage:
    draft.fact("running")
    speed, gap = draft.rng.randint(6, 20) * 5, draft.amount(40, 120)
    draft.call("setCruiseControl", speed=speed, activate=True, distanceToNextVehicle=gap)
    return draft.phrase(
        "Cruise at {speed}, and stay {gap} metres behind the next car.",
        "Activate the cruise control: speed {speed}, distance {gap} metres.",
        partial="Activate the cruise control, with a distance of {gap} metres.",
        detail=("Speed {speed}.", "At {speed}."),
        speed=speed,
        gap=gap,
    )


def ease_off(draft: Draft) -> UserMessage:
    draft.fact("running")
    draft.call("releaseBrakePedal")
    return draft.phrase(
        "Foot off the brake pedal.", "The engine runs, so let go of the brake pedal."
    )


VEHICLE_REQUESTS = (
    *requests((VEHICLE,), refuel, refuel_liters, fuel_in_liters, lock_up, unlock, start, climate),
    *requests((VEHICLE,), headlights, parking_brake, navigate, tire_shop, tires, distance),
    *requests((VEHICLE,), feasible, status, brake, log),
    *requests((VEHICLE,), cruise, ease_off, follows="running"),
)
