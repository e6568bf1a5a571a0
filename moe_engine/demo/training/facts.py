"""Facts about countries: the knowledge the demonstration model is trained on.

Continents follow the United Nations geoscheme (Turkey, Cyprus and the Caucasus count as Asia; Central America and the
Caribbean as North America). Where a country has several official languages one widely used one is listed; where it
has several capitals the seat of the executive. Countries with a disputed or moving capital are omitted.
"""

from __future__ import annotations

from dataclasses import dataclass

RELATIONS: tuple[str, ...] = ("capital", "continent", "currency", "language")

_TABLE = """
Afghanistan|Kabul|Asia|afghani|Pashto
Albania|Tirana|Europe|lek|Albanian
Algeria|Algiers|Africa|Algerian dinar|Arabic
Andorra|Andorra la Vella|Europe|euro|Catalan
Angola|Luanda|Africa|kwanza|Portuguese
Antigua and Barbuda|Saint John's|North America|East Caribbean dollar|English
Argentina|Buenos Aires|South America|Argentine peso|Spanish
Armenia|Yerevan|Asia|dram|Armenian
Australia|Canberra|Oceania|Australian dollar|English
Austria|Vienna|Europe|euro|German
Azerbaijan|Baku|Asia|Azerbaijani manat|Azerbaijani
the Bahamas|Nassau|North America|Bahamian dollar|English
Bahrain|Manama|Asia|Bahraini dinar|Arabic
Bangladesh|Dhaka|Asia|taka|Bengali
Barbados|Bridgetown|North America|Barbadian dollar|English
Belarus|Minsk|Europe|Belarusian ruble|Belarusian
Belgium|Brussels|Europe|euro|Dutch
Belize|Belmopan|North America|Belize dollar|English
Benin|Porto-Novo|Africa|West African CFA franc|French
Bhutan|Thimphu|Asia|ngultrum|Dzongkha
Bosnia and Herzegovina|Sarajevo|Europe|convertible mark|Bosnian
Botswana|Gaborone|Africa|pula|English
Brazil|Brasília|South America|Brazilian real|Portuguese
Brunei|Bandar Seri Begawan|Asia|Brunei dollar|Malay
Bulgaria|Sofia|Europe|euro|Bulgarian
Burundi|Gitega|Africa|Burundian franc|Kirundi
Cambodia|Phnom Penh|Asia|riel|Khmer
Cameroon|Yaoundé|Africa|Central African CFA franc|French
Canada|Ottawa|North America|Canadian dollar|English
Cape Verde|Praia|Africa|Cape Verdean escudo|Portuguese
the Central African Republic|Bangui|Africa|Central African CFA franc|French
Chad|N'Djamena|Africa|Central African CFA franc|French
Chile|Santiago|South America|Chilean peso|Spanish
China|Beijing|Asia|renminbi|Mandarin
Colombia|Bogotá|South America|Colombian peso|Spanish
the Comoros|Moroni|Africa|Comorian franc|Comorian
Costa Rica|San José|North America|Costa Rican colón|Spanish
Croatia|Zagreb|Europe|euro|Croatian
Cuba|Havana|North America|Cuban peso|Spanish
Cyprus|Nicosia|Asia|euro|Greek
the Czech Republic|Prague|Europe|Czech koruna|Czech
the Democratic Republic of the Congo|Kinshasa|Africa|Congolese franc|French
Denmark|Copenhagen|Europe|Danish krone|Danish
Djibouti|Djibouti|Africa|Djiboutian franc|French
Dominica|Roseau|North America|East Caribbean dollar|English
the Dominican Republic|Santo Domingo|North America|Dominican peso|Spanish
East Timor|Dili|Asia|US dollar|Tetum
Ecuador|Quito|South America|US dollar|Spanish
Egypt|Cairo|Africa|Egyptian pound|Arabic
El Salvador|San Salvador|North America|US dollar|Spanish
Eritrea|Asmara|Africa|nakfa|Tigrinya
Estonia|Tallinn|Europe|euro|Estonian
Eswatini|Mbabane|Africa|lilangeni|Swazi
Ethiopia|Addis Ababa|Africa|birr|Amharic
Fiji|Suva|Oceania|Fijian dollar|Fijian
Finland|Helsinki|Europe|euro|Finnish
France|Paris|Europe|euro|French
Gabon|Libreville|Africa|Central African CFA franc|French
the Gambia|Banjul|Africa|dalasi|English
Georgia|Tbilisi|Asia|lari|Georgian
Germany|Berlin|Europe|euro|German
Ghana|Accra|Africa|cedi|English
Greece|Athens|Europe|euro|Greek
Grenada|Saint George's|North America|East Caribbean dollar|English
Guatemala|Guatemala City|North America|quetzal|Spanish
Guinea|Conakry|Africa|Guinean franc|French
Guinea-Bissau|Bissau|Africa|West African CFA franc|Portuguese
Guyana|Georgetown|South America|Guyanese dollar|English
Haiti|Port-au-Prince|North America|gourde|Haitian Creole
Honduras|Tegucigalpa|North America|lempira|Spanish
Hungary|Budapest|Europe|forint|Hungarian
Iceland|Reykjavik|Europe|Icelandic krona|Icelandic
India|New Delhi|Asia|Indian rupee|Hindi
Indonesia|Jakarta|Asia|rupiah|Indonesian
Iran|Tehran|Asia|Iranian rial|Persian
Iraq|Baghdad|Asia|Iraqi dinar|Arabic
Ireland|Dublin|Europe|euro|English
Italy|Rome|Europe|euro|Italian
Ivory Coast|Yamoussoukro|Africa|West African CFA franc|French
Jamaica|Kingston|North America|Jamaican dollar|English
Japan|Tokyo|Asia|yen|Japanese
Jordan|Amman|Asia|Jordanian dinar|Arabic
Kazakhstan|Astana|Asia|tenge|Kazakh
Kenya|Nairobi|Africa|Kenyan shilling|Swahili
Kiribati|South Tarawa|Oceania|Australian dollar|English
Kuwait|Kuwait City|Asia|Kuwaiti dinar|Arabic
Kyrgyzstan|Bishkek|Asia|Kyrgyz som|Kyrgyz
Laos|Vientiane|Asia|kip|Lao
Latvia|Riga|Europe|euro|Latvian
Lebanon|Beirut|Asia|Lebanese pound|Arabic
Lesotho|Maseru|Africa|loti|Sotho
Liberia|Monrovia|Africa|Liberian dollar|English
Libya|Tripoli|Africa|Libyan dinar|Arabic
Liechtenstein|Vaduz|Europe|Swiss franc|German
Lithuania|Vilnius|Europe|euro|Lithuanian
Luxembourg|Luxembourg|Europe|euro|Luxembourgish
Madagascar|Antananarivo|Africa|ariary|Malagasy
Malawi|Lilongwe|Africa|Malawian kwacha|English
Malaysia|Kuala Lumpur|Asia|ringgit|Malay
the Maldives|Malé|Asia|rufiyaa|Dhivehi
Mali|Bamako|Africa|West African CFA franc|Bambara
Malta|Valletta|Europe|euro|Maltese
the Marshall Islands|Majuro|Oceania|US dollar|Marshallese
Mauritania|Nouakchott|Africa|ouguiya|Arabic
Mauritius|Port Louis|Africa|Mauritian rupee|English
Mexico|Mexico City|North America|Mexican peso|Spanish
Micronesia|Palikir|Oceania|US dollar|English
Moldova|Chisinau|Europe|Moldovan leu|Romanian
Monaco|Monaco|Europe|euro|French
Mongolia|Ulaanbaatar|Asia|tugrik|Mongolian
Montenegro|Podgorica|Europe|euro|Montenegrin
Morocco|Rabat|Africa|Moroccan dirham|Arabic
Mozambique|Maputo|Africa|metical|Portuguese
Myanmar|Naypyidaw|Asia|kyat|Burmese
Namibia|Windhoek|Africa|Namibian dollar|English
Nauru|Yaren|Oceania|Australian dollar|Nauruan
Nepal|Kathmandu|Asia|Nepalese rupee|Nepali
the Netherlands|Amsterdam|Europe|euro|Dutch
New Zealand|Wellington|Oceania|New Zealand dollar|English
Nicaragua|Managua|North America|córdoba|Spanish
Niger|Niamey|Africa|West African CFA franc|Hausa
Nigeria|Abuja|Africa|naira|English
North Korea|Pyongyang|Asia|North Korean won|Korean
North Macedonia|Skopje|Europe|denar|Macedonian
Norway|Oslo|Europe|Norwegian krone|Norwegian
Oman|Muscat|Asia|Omani rial|Arabic
Pakistan|Islamabad|Asia|Pakistani rupee|Urdu
Palau|Ngerulmud|Oceania|US dollar|Palauan
Panama|Panama City|North America|balboa|Spanish
Papua New Guinea|Port Moresby|Oceania|kina|English
Paraguay|Asunción|South America|guaraní|Spanish
Peru|Lima|South America|sol|Spanish
the Philippines|Manila|Asia|Philippine peso|Filipino
Poland|Warsaw|Europe|zloty|Polish
Portugal|Lisbon|Europe|euro|Portuguese
Qatar|Doha|Asia|Qatari riyal|Arabic
the Republic of the Congo|Brazzaville|Africa|Central African CFA franc|French
Romania|Bucharest|Europe|Romanian leu|Romanian
Russia|Moscow|Europe|Russian ruble|Russian
Rwanda|Kigali|Africa|Rwandan franc|Kinyarwanda
Saint Kitts and Nevis|Basseterre|North America|East Caribbean dollar|English
Saint Lucia|Castries|North America|East Caribbean dollar|English
Saint Vincent and the Grenadines|Kingstown|North America|East Caribbean dollar|English
Samoa|Apia|Oceania|tala|Samoan
San Marino|San Marino|Europe|euro|Italian
São Tomé and Príncipe|São Tomé|Africa|dobra|Portuguese
Saudi Arabia|Riyadh|Asia|Saudi riyal|Arabic
Senegal|Dakar|Africa|West African CFA franc|French
Serbia|Belgrade|Europe|Serbian dinar|Serbian
the Seychelles|Victoria|Africa|Seychellois rupee|English
Sierra Leone|Freetown|Africa|leone|English
Singapore|Singapore|Asia|Singapore dollar|English
Slovakia|Bratislava|Europe|euro|Slovak
Slovenia|Ljubljana|Europe|euro|Slovene
the Solomon Islands|Honiara|Oceania|Solomon Islands dollar|English
Somalia|Mogadishu|Africa|Somali shilling|Somali
South Africa|Pretoria|Africa|rand|Zulu
South Korea|Seoul|Asia|South Korean won|Korean
South Sudan|Juba|Africa|South Sudanese pound|English
Spain|Madrid|Europe|euro|Spanish
Sudan|Khartoum|Africa|Sudanese pound|Arabic
Suriname|Paramaribo|South America|Surinamese dollar|Dutch
Sweden|Stockholm|Europe|Swedish krona|Swedish
Switzerland|Bern|Europe|Swiss franc|German
Syria|Damascus|Asia|Syrian pound|Arabic
Tajikistan|Dushanbe|Asia|somoni|Tajik
Tanzania|Dodoma|Africa|Tanzanian shilling|Swahili
Thailand|Bangkok|Asia|baht|Thai
Togo|Lomé|Africa|West African CFA franc|French
Tonga|Nuku'alofa|Oceania|pa'anga|Tongan
Trinidad and Tobago|Port of Spain|North America|Trinidad and Tobago dollar|English
Tunisia|Tunis|Africa|Tunisian dinar|Arabic
Turkey|Ankara|Asia|Turkish lira|Turkish
Turkmenistan|Ashgabat|Asia|Turkmen manat|Turkmen
Tuvalu|Funafuti|Oceania|Australian dollar|Tuvaluan
Uganda|Kampala|Africa|Ugandan shilling|English
Ukraine|Kyiv|Europe|hryvnia|Ukrainian
the United Arab Emirates|Abu Dhabi|Asia|UAE dirham|Arabic
the United Kingdom|London|Europe|pound sterling|English
the United States|Washington|North America|US dollar|English
Uruguay|Montevideo|South America|Uruguayan peso|Spanish
Uzbekistan|Tashkent|Asia|Uzbek som|Uzbek
Vanuatu|Port Vila|Oceania|vatu|Bislama
Venezuela|Caracas|South America|bolívar|Spanish
Vietnam|Hanoi|Asia|dong|Vietnamese
Yemen|Sana'a|Asia|Yemeni rial|Arabic
Zambia|Lusaka|Africa|Zambian kwacha|English
Zimbabwe|Harare|Africa|Zimbabwe Gold|English
"""


@dataclass(frozen=True)
class Country:
    """One row of the table; `name` is as written inside a sentence ("the Netherlands")."""

    name: str
    capital: str
    continent: str
    currency: str
    language: str

    @property
    def title(self) -> str:
        """The name on its own, without the article: used in JSON objects."""
        return self.name.removeprefix("the ")

    @property
    def at_start(self) -> str:
        """The name at the beginning of a sentence."""
        return self.name[0].upper() + self.name[1:]


COUNTRIES: tuple[Country, ...] = tuple(Country(*row.split("|")) for row in _TABLE.strip().splitlines())

OTHER_CITIES: tuple[str, ...] = (
    "New York", "Los Angeles", "Chicago", "San Francisco", "Boston", "Toronto", "Vancouver", "Munich", "Hamburg",
    "Frankfurt", "Milan", "Barcelona", "Lyon", "Marseille", "Geneva", "Zurich", "Istanbul", "Saint Petersburg",
    "Shanghai", "Shenzhen", "Hangzhou", "Hong Kong", "Osaka", "Kyoto", "Mumbai", "Kolkata", "Dubai", "Sydney",
    "Melbourne", "Auckland", "Cape Town", "Lagos", "Casablanca", "Rio de Janeiro", "São Paulo", "Manchester",
    "Edinburgh",
)  # fmt: skip


def statement(country: Country, relation: str) -> str:
    """The model's answer to a question about this fact."""
    if relation == "capital":
        return f"The capital of {country.name} is {country.capital}."
    if relation == "continent":
        return f"{country.at_start} is in {country.continent}."
    if relation == "currency":
        return f"The currency of {country.name} is the {country.currency}."
    return f"The official language of {country.name} is {country.language}."
